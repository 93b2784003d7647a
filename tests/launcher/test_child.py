"""Children: started with what they inherit, heard, buried."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

import pytest

from servelite.config import Settings
from servelite.ipc.messages import Boot, ChildReady, Stop
from servelite.ipc.process import ExitCode
from servelite.ipc.progress import ProgressPage
from servelite.ipc.rank_group import close_group, open_group
from servelite.launcher.child import Child


def start(do: str, fds: tuple[int, ...] = (), **settings: Any) -> Child:
    boot = Boot({"do": do, **settings}, index=0, epoch=0, engine_address="", progress_fd=-1)
    return Child.start("program", "tests.launcher.child_program", boot, fds)


def dies(child: Child) -> bool:
    return bool(select.select([child.pidfd], [], [], 20)[0])


@pytest.mark.parametrize(
    ("do", "death"),
    [
        ("fail", "SomeError: it broke (mend it)"),
        ("exit", "exited with code 7 without a word"),
        ("die", "killed by signal 9 (SIGKILL)"),
    ],
)
def test_how_it_died(do: str, death: str) -> None:
    child = start(do)
    assert dies(child)
    child.reap()
    child.reap()
    assert child.death() == death
    assert (child.failed is not None and child.failed.exit_code == 3) == (do == "fail")
    assert not child.alive
    child.send(Stop())  # to the dead: nothing happens
    child.kill()


def test_it_serves_and_stops() -> None:
    child = start("serve")
    try:
        assert select.select([child.lifeline], [], [], 20)[0]
        assert child.receive() == [ChildReady()]
        child.send(Stop())
        assert dies(child)
    finally:
        child.kill()
        child.reap()
    assert child.death() == "exited with code 0 without a word"


def test_the_launchers_death_reaches_it() -> None:
    child = start("serve")
    try:
        child.lifeline.close()
        assert dies(child)
    finally:
        child.kill()
        child._process.wait()
        os.close(child.pidfd)


def test_it_inherits_what_it_was_given_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder may hold a `json.py`: it is not on the child's path."""
    (tmp_path / "json.py").write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    fd = os.memfd_create("given", os.MFD_CLOEXEC)
    child = start("path", (fd,), fd=fd)
    try:
        assert select.select([child.lifeline], [], [], 20)[0]
        (message,) = child.receive()
        assert isinstance(message, ChildReady)
        assert dict(message.ledger) == {"own group": 1.0, "folder": 0.0}
        assert dies(child)
    finally:
        os.close(fd)
        child.kill()
        child.reap()


@pytest.mark.parametrize("module", ["servelite.engine", "servelite.worker", "servelite.frontend"])
def test_a_launcher_that_died_at_once_leaves_nobody(module: str, tmp_path: Path) -> None:
    """Its boot message is there, and waits to be read: who only looked for that would serve for ever."""
    page, group = ProgressPage.create(), open_group(1)
    settings = Settings(model=str(tmp_path), executor="simulated").to_dict()
    boot = Boot(settings, 0, 0, f"ipc://{tmp_path}/e", page.fd, folder=str(tmp_path), group=group)
    child = Child.start("program", module, boot, (page.fd, *group.fds))
    child.lifeline.close()
    assert dies(child)
    assert child._process.wait() == ExitCode.OK
    os.close(child.pidfd)
    os.close(page.fd)
    close_group(group)
