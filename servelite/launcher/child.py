"""One child process: started by exec, spoken to over its lifeline, its death told by the kernel."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import Final

from servelite.ipc.lifeline import Lifeline, lifeline_pair
from servelite.ipc.messages import Boot, ChildFailed, FromChild, ToChild
from servelite.ipc.process import child_environment

_REAP_S: Final = 5.0
_CRASHES: Final = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS)


class Child:
    """A running (or dead) child. Used by the thread that started it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], lifeline: Lifeline) -> None:
        self.name = name
        self.lifeline = lifeline
        self.ready = False
        self.failed: ChildFailed | None = None
        self.killed_for = ""
        """Why the launcher killed it, where it did."""
        self._process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.started = time.monotonic()

    @classmethod
    def start(cls, name: str, module: str, boot: Boot, fds: tuple[int, ...], share: int = 1) -> Child:
        """Run `python -m module` with `fds` inherited, and send it `boot`.

        `share`: one part in so many of the CPUs is for its threads. It gets a process group of its own: a
        terminal's Ctrl-C is the launcher's to answer.
        """
        lifeline, child_fd = lifeline_pair()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, "--lifeline", str(child_fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=(child_fd, *fds),
                env=child_environment(share),
                process_group=0,
            )
        finally:
            os.close(child_fd)
        child = cls(name, process, lifeline)
        lifeline.send(boot)
        return child

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once its death was noticed by `reap`."""
        return self.pidfd >= 0

    def send(self, message: ToChild) -> None:
        """Send a control message; a dead child is no error, its death is told by `pidfd`."""
        if self.alive:
            self.lifeline.send(message)

    def receive(self) -> list[FromChild]:
        """The messages that wait; never blocks. What it says of its own failure is kept in `failed`."""
        messages: list[FromChild] = []
        while select.select([self.lifeline], [], [], 0)[0]:
            message = self.lifeline.recv()
            if message is None:
                break
            if isinstance(message, ChildFailed):
                self.failed = message
            messages.append(message)  # type: ignore[arg-type]
        return messages

    def kill(self, why: str = "") -> None:
        """End it at once."""
        if self.alive:
            self.killed_for = why
            self._process.kill()

    def reap(self) -> None:
        """Collect a child that has died (or is about to), its last messages included."""
        if not self.alive:
            return
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.receive()
        os.close(self.pidfd)
        self.pidfd = -1
        self.lifeline.close()

    @property
    def died_from_inside(self) -> bool:
        """Whether what it did itself killed it: an error, an exit, a crash; not a signal from others."""
        code = self._process.returncode
        return (
            bool(self.killed_for) or self.failed is not None or code is None or code >= 0 or -code in _CRASHES
        )

    def death(self) -> str:
        """How it died, in words: its own account if it gave one."""
        if self.failed is not None:
            hint = f" ({self.failed.hint})" if self.failed.hint else ""
            return f"{self.failed.kind}: {self.failed.message}{hint}"
        if self.killed_for:
            return self.killed_for
        code = self._process.returncode
        if code is not None and code < 0:
            return f"killed by signal {-code} ({signal.Signals(-code).name})"
        return f"exited with code {code} without a word"
