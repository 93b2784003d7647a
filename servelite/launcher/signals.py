"""Signals as bytes on a socket, for a selector: nothing happens inside a handler."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Container, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OURS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)


def reclaim_signals() -> None:
    """Undo what this process inherited: signals ignored (a shell's `&` does so with SIGINT) or blocked.

    SIGHUP is left ignored where it is: `nohup` says so. An ignored SIGCHLD would hide how a child died.
    """
    for number in _OURS:
        if signal.getsignal(number) is signal.SIG_IGN:
            handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, handler)
    if os.getpid() == 1:  # of a container: the kernel keeps signals without a handler from it
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDING, signal.SIGCHLD})


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """While open, an ending signal ends the process on the spot. Main thread only, before any child.

    A download of many threads would else be waited for to its end.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, _exit_now)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SignalPipe:
    """While open, ending signals make `fileno` readable instead of ending the process. Main thread only."""

    def __enter__(self) -> SignalPipe:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers: dict[int, Any] = {}
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                self._handlers[number] = signal.signal(number, _note)
        if os.getpid() == 1:  # to be woken for `reap_orphans`
            self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """For the selector."""
        return self._reader.fileno()

    def read(self) -> list[int]:
        """The ending signals that came since the last call."""
        try:
            return [number for number in self._reader.recv(256) if number in ENDING]
        except BlockingIOError:
            return []


def reap_orphans(ours: Container[int]) -> None:
    """Collect the dead that were left to this process as PID 1; children in `ours` are not touched."""
    for word in Path("/proc/thread-self/children").read_text().split():
        if int(word) not in ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(word), os.WNOHANG)


def _exit(number: int, frame: FrameType | None) -> None:
    """The default action of an ending signal, with the exit code that a shell gives it."""
    raise SystemExit(128 + number)


def _exit_now(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nservelite: interrupted; what has been downloaded is kept\n")
    os._exit(128 + number)


def _note(number: int, frame: FrameType | None) -> None:
    """The signal's number is on its way through the wakeup descriptor already."""
