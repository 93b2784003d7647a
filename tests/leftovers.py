"""What a test leaves behind: processes, shared-memory segments, sockets, temporary files.

Every child inherits a variable with a value of this run, so that one whose parent is gone is still
known as ours; temporary files go to a folder of this run. Other programs on the machine, another
run of these tests among them, are not looked at.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

VARIABLE = "SERVELITE_TEST_RUN"
GRACE_SECONDS = 3.0
SHM = "/dev/shm"


@dataclass(frozen=True)
class Traces:
    """What of this run was there at one moment."""

    processes: frozenset[int]
    segments: frozenset[str]
    sockets: frozenset[str]
    files: frozenset[str]

    def since(self, before: Traces) -> list[str]:
        """One line for each trace that was not there before."""
        return [
            *(describe_process(pid) for pid in sorted(self.processes - before.processes)),
            *(f"shared-memory segment {name}" for name in sorted(self.segments - before.segments)),
            *(f"socket {path}" for path in sorted(self.sockets - before.sockets)),
            *(f"temporary file {path}" for path in sorted(self.files - before.files)),
        ]


class Run:
    """One run of the tests: its mark in the environment and its temporary folders.

    Their paths are short whatever TMPDIR is, since that of a socket may have 107 bytes.
    """

    def __init__(self) -> None:
        self.mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.root = Path(tempfile.mkdtemp(prefix="slt-", dir="/tmp"))
        self.folder = self.root / "tmp"
        self.folder.mkdir()

    def enter(self, config: pytest.Config) -> None:
        """Mark this process's environment and move its temporary files, its children's and pytest's."""
        os.environ[VARIABLE] = self.mark
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        config.option.basetemp = config.option.basetemp or str(self.root / "t")

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def traces(self) -> Traces:
        return Traces(
            processes=frozenset(self._processes()),
            segments=frozenset(os.listdir(SHM)) if os.path.isdir(SHM) else frozenset(),
            sockets=frozenset(self._sockets()),
            files=frozenset(entry.path for entry in os.scandir(self.folder)),
        )

    def _processes(self) -> Iterator[int]:
        mark = f"{VARIABLE}={self.mark}".encode()
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            environment = _read(f"/proc/{entry.name}/environ")
            # Zombies and kernel threads have no environment; a fork without exec keeps ours, unmarked.
            if environment and (mark in environment.split(b"\0") or _parent(entry.name) == os.getpid()):
                yield int(entry.name)

    def _sockets(self) -> Iterator[str]:
        """Bound sockets with a path of this run, also those of this very process."""
        for line in _read("/proc/net/unix").decode(errors="replace").splitlines()[1:]:
            path = line.split(maxsplit=7)[7:]
            if path and path[0].startswith(f"{self.root}/"):
                yield path[0]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _parent(pid: str) -> int:
    status = _read(f"/proc/{pid}/stat")
    return int(status.rpartition(b")")[2].split()[1]) if status else 0


def describe_process(pid: int) -> str:
    words = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return f"process {pid}: {words[:200]}"


def end(pid: int) -> None:
    """Kill one process that a test left; it may be gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def settle(run: Run, before: Traces) -> list[str]:
    """What is left of what came after `before`, given a moment to go; the processes are ended."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (now := _without_checkers(run.traces(), before)).since(before):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    new = now.segments - before.segments
    if new:
        now = replace(now, segments=now.segments - held_elsewhere(new, now.processes))
    left = now.since(before)
    for pid in now.processes - before.processes:
        end(pid)
    return left


def _without_checkers(now: Traces, before: Traces) -> Traces:
    """A server that was there before starts the process that checks grammars with the first check."""
    checkers = {
        pid
        for pid in now.processes - before.processes
        if _parent(str(pid)) in before.processes and describe_process(pid).endswith("servelite: grammars")
    }
    return replace(now, processes=now.processes - checkers)


def held_elsewhere(names: frozenset[str], ours: frozenset[int]) -> frozenset[str]:
    """Those of the segments `names` that a process other than `ours` has mapped: another program's."""
    held: set[str] = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) not in {*ours, os.getpid()}:
            maps = _read(f"/proc/{entry.name}/maps").decode(errors="replace")
            held |= {name for name in names if f"{SHM}/{name}" in maps}
    return frozenset(held)


class LeftoverCheck:
    """The plugin: a test that leaves something behind fails, and so does a run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.left: list[str] = []
        self._before = run.traces()

    @pytest.fixture(autouse=True)
    def _nothing_left_behind(self) -> Iterator[None]:
        # Function scope: what wider fixtures start is there already and not this test's.
        before = self.run.traces()
        yield
        if left := settle(self.run, before):
            pytest.fail("left behind: " + "; ".join(left), pytrace=False)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.left = settle(self.run, self._before)
        if self.left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left:
            terminalreporter.section("left behind by the whole run", red=True)
            for line in self.left:
                terminalreporter.line(line)

    def pytest_unconfigure(self) -> None:
        self.run.close()
