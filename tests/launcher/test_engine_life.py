"""An engine and its ranks live and die together."""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import time

import pytest

from servelite.config import Settings
from servelite.ipc.messages import Boot
from servelite.ipc.progress import ProgressPage
from servelite.ipc.rank_group import open_group
from servelite.launcher.child import Child
from servelite.launcher.engine_life import EngineLife


def life(*does: str) -> EngineLife:
    group = open_group(len(does) - 1)
    members = (
        Child.start(name, "tests.launcher.child_program", Boot({"do": do}, 0, 0, "", -1), group.fds)
        for name, do in zip(("engine", "worker 0", "worker 1"), does, strict=True)
    )
    return EngineLife(Boot({}, 0, 0, "", -1, group=group), tuple(members))


def bury(engine: EngineLife) -> None:
    """As the supervisor does: each death as the kernel tells it."""
    deadline = time.monotonic() + 20
    while alive := {member.pidfd: member for member in engine.members if member.alive}:
        assert time.monotonic() < deadline
        for pidfd in select.select(list(alive), [], [], 1)[0]:
            alive[pidfd].reap()
            engine.lost(alive[pidfd])


def wait_for(child: Child) -> None:
    assert select.select([child.lifeline], [], [], 20)[0]
    child.receive()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_that_is_killed_takes_the_others_along(victim: int) -> None:
    engine = life("serve", "serve", "serve")
    descriptors = engine.boot.group.fds if engine.boot.group is not None else ()
    for member in engine.members:
        wait_for(member)
    os.kill(engine.members[victim].pid, signal.SIGKILL)
    bury(engine)
    assert engine.first_dead is engine.members[victim]
    assert not engine.died_from_inside
    prefix = "" if victim == 0 else f"worker {victim - 1}: "
    assert engine.death() == prefix + "killed by signal 9 (SIGKILL)"
    for fd in descriptors:  # what they shared is given back
        with pytest.raises(OSError):
            os.fstat(fd)
    engine.end()


def test_an_error_of_a_rank_is_its_own_account() -> None:
    engine = life("serve", "load", "fail")
    bury(engine)
    assert engine.died_from_inside
    assert engine.death() == "worker 1: SomeError: it broke (mend it)"


def test_a_life_that_cannot_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third process finds no room: the two before it are gone again, and what they shared."""
    started: list[Child] = []
    start = Child.start

    def some(name: str, module: str, *rest: object, **options: object) -> Child:
        if len(started) == 2:
            raise OSError(errno.EAGAIN, "no more processes")
        started.append(start(name, "tests.launcher.child_program", Boot({"do": "serve"}, 0, 0, "", -1), ()))
        return started[-1]

    monkeypatch.setattr(Child, "start", some)
    before = sorted(os.listdir("/proc/self/fd"))
    page = ProgressPage.create()
    with pytest.raises(OSError, match="no more processes"):
        EngineLife.start(Settings(tp=3), "/tmp", page)
    assert len(started) == 2 and not any(child.alive for child in started)
    os.close(page.fd)
    del page
    started.clear()
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_hang_is_the_engines() -> None:
    engine = life("serve", "serve", "serve")
    engine.kill("it hung")
    bury(engine)
    assert engine.died_from_inside
    assert engine.death() == "it hung"
