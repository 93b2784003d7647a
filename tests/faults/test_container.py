"""A server as a container has it: PID 1 of its own processes, no root, a read-only root, 64 MB of /dev/shm.

Made with user, mount and process namespaces, so that it takes no Docker and, where the kernel lets users
make such, no root. On the simulated executor.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from servelite.ipc.process import ExitCode
from tests.faults.streams import all_streams
from tests.faults.test_engine_death import body, wait_until_ready, whole
from tests.http.server import Server, end, wait_ready

USER = 10001
SHM_BYTES = 64 << 20
# As "root" of a first user namespace, which may mount; then as nobody in particular of a second one. What
# sleeps has no parent but PID 1, as what a shell of `docker exec` leaves behind.
ALONE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc")
SCRIPT = f"""
mount -t tmpfs -o size={SHM_BYTES},mode=1777 none /dev/shm &&
mount -t tmpfs -o mode=1777 none "$0" &&
mount -o remount,bind,ro / &&
(sleep 1000 > /dev/null 2>&1 &) &&
exec unshare --user --map-user={USER} --map-group={USER} "$@"
"""


class Container(Server):
    """A server whose launcher is the only child of the process that was started."""

    @property
    def pid(self) -> int:
        """The launcher's, as this machine counts."""
        outer = self.process.pid
        return int(Path(f"/proc/{outer}/task/{outer}/children").read_text())

    def processes(self) -> dict[int, str]:
        """Its processes' IDs, as this machine counts, and states; Z is a zombie."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns" / "pid") == namespace:
                    found[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                pass  # ended meanwhile, or another user's
        return found


def started(folder: Path, *command: str) -> Container:
    """Run `command` alone, with `folder`/run in memory and writable."""
    (folder / "run").mkdir(exist_ok=True)
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*ALONE, "sh", "-c", SCRIPT, str(folder / "run"), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    return Container(process, log)


@contextmanager
def container(folder: Path, model: Path, *flags: str) -> Iterator[Container]:
    """A server in a container, ready."""
    runtime = ("--runtime-dir", str(folder / "run"))
    name = ("--served-model-name", "demo", "--port", "0")
    server = started(folder, sys.executable, "-m", "servelite", "serve", str(model), *name, *runtime, *flags)
    try:
        wait_ready(server)
        yield server
    finally:
        if server.process.poll() is None:
            os.kill(server.pid, signal.SIGKILL)  # and with PID 1 all others
        end(server)


@pytest.fixture(scope="module", autouse=True)
def _namespaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where this machine has none for us."""
    try:
        trial = started(tmp_path_factory.mktemp("trial"), "true")
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if trial.process.wait(30):
        pytest.skip(f"no namespaces can be made: {trial.errors().strip()}")
    end(trial)


def check_confined(server: Container) -> None:
    """It is what this file says."""
    pid = server.pid
    status = Path(f"/proc/{pid}/status").read_text()
    assert re.search(r"^NSpid:.*\t1$", status, re.MULTILINE)
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    assert Path(f"/proc/{pid}/uid_map").read_text().split() == [str(USER), str(os.getuid()), "1"]
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    assert [mount[5].split(",")[0] for mount in mounts if mount[4] == "/"][-1] == "ro"
    shm = os.statvfs(f"/proc/{pid}/root/dev/shm")
    assert shm.f_blocks * shm.f_frsize == SHM_BYTES


def end_the_orphan(server: Container) -> None:
    """The process that PID 1 did not start becomes a zombie, unless PID 1 reaps it."""
    (orphan,) = (
        pid for pid in server.children() if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")
    )
    os.kill(orphan, signal.SIGTERM)


def settled(server: Container, count: int) -> bool:
    """Whether `count` processes are left, none of them a zombie, within some seconds."""
    deadline = time.monotonic() + 10
    while len(now := server.processes()) != count or "Z" in now.values():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "flags"), [("engine core", ()), ("worker 1", ("--tp", "2"))])
async def test_a_container_recovers_and_drains(
    tmp_path: Path, demo_model: Path, victim: str, flags: tuple[str, ...]
) -> None:
    simulated = ("--executor", "simulated", "--simulated-step-ms", "10")
    with container(tmp_path, demo_model, *simulated, *flags) as server:
        check_confined(server)
        processes = len(server.processes())
        bodies = [body(number) for number in range(4)]
        expected = await whole(server.port, bodies)
        assert all(told.done for told in expected)

        tasks = await all_streams(server.port, bodies)
        os.kill(server.child(victim), signal.SIGKILL)
        for mine, theirs in zip(await asyncio.gather(*tasks), expected, strict=True):
            assert (mine.text, mine.token_ids, mine.error) == (theirs.text, theirs.token_ids, None)
        await wait_until_ready(server)
        assert server.idle_metrics()["servelite_engine_restarts_total"] == 1

        end_the_orphan(server)
        assert settled(server, processes - 1), server.processes()

        tasks = await all_streams(server.port, bodies)
        server.signal(signal.SIGTERM)
        assert all(told.done for told in await asyncio.gather(*tasks))
        assert await asyncio.to_thread(server.wait) == ExitCode.OK
        assert server.errors().splitlines()[-1] == "servelite: drained: no answers were cut"
    assert not list((tmp_path / "run").iterdir()) and not os.path.ismount(tmp_path / "run")
