"""`servelite serve`: starts the processes, watches them, drains and ends them.

One selector over signals, deaths and lifelines; between events the launcher sleeps. Its phases go
one way: starting, serving, draining, stopping.
"""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import socket
import sys
import time
from typing import Final

import servelite
from servelite.config import Settings
from servelite.ipc.messages import ChildReady, Drain, Drained, EngineDown, Stop
from servelite.ipc.process import ExitCode
from servelite.ipc.progress import ProgressPage
from servelite.launcher.child import Child
from servelite.launcher.errors import LaunchError
from servelite.launcher.listen import open_listener, raise_descriptor_limit, url_of
from servelite.launcher.runtime_dir import runtime_folder
from servelite.launcher.signals import SignalPipe, reclaim_signals
from servelite.launcher.start import check_model, engine_boot, find_model, start_engine, start_front_end

_STOP_S: Final = 5.0  # from Stop to SIGKILL
_DRAIN_GRACE_S: Final = 3.0  # a front end's time to say Drained, after its time-out
_HURRY_S: Final = 0.9  # from a second signal to SIGKILL
_LAST_WORDS_S: Final = 1.0  # for answers in flight to end with an error when the engine has died


class Phase(enum.IntEnum):
    """In order."""

    STARTING = 0
    SERVING = 1
    DRAINING = 2
    STOPPING = 3


def serve(settings: Settings) -> int:
    """Serve until a signal or a death; returns the exit code. Called from the main thread."""
    started = time.monotonic()
    reclaim_signals()
    try:
        settings = find_model(settings)  # may take its time over a download: signals end it as usual
        check_model(settings)
        with SignalPipe() as signals:
            raise_descriptor_limit()
            listener = open_listener(settings.host, settings.port)
            with listener, runtime_folder(settings.runtime_dir) as folder:
                return Supervisor(settings, signals, listener, started).run(folder)
    except LaunchError as error:
        print(f"servelite: {error}", file=sys.stderr)
        return error.exit_code


class Supervisor:
    """The processes of one server."""

    def __init__(
        self, settings: Settings, signals: SignalPipe, listener: socket.socket, started: float
    ) -> None:
        self._settings = settings
        self._signals = signals
        self._listener = listener
        self._started = started
        self._phase = Phase.STARTING
        self._deadline: float | None = None  # when the phase ends whether all have answered or not
        self._hurried = False  # by a second signal
        self._asked = False  # to end, by a signal while serving
        self._cut = 0  # requests that the drain ended with an error
        self._undrained: set[Child] = set()
        self._culprit: Child | None = None
        self._children: list[Child] = []
        self._front_ends: list[Child] = []
        self._selector = selectors.DefaultSelector()

    def run(self, folder: str) -> int:
        """Start everything, return when nothing is left."""
        page = self._page = ProgressPage.create()
        try:
            boot = engine_boot(self._settings, folder, page)
            self._epoch = boot.epoch
            self._selector.register(self._signals, selectors.EVENT_READ, None)
            self._engine = self._watch(start_engine(boot))
            self._front_ends.append(self._watch(start_front_end(0, boot, self._listener)))
            while any(child.alive for child in self._children):
                self._step()
        finally:
            for child in self._children:
                child.kill()
                child.reap()
            self._selector.close()
            os.close(page.fd)
        return self._report()

    def _watch(self, child: Child) -> Child:
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.lifeline, selectors.EVENT_READ, child)
        return child

    def _step(self) -> None:
        """Sleep until something happens, and act on it."""
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        events = self._selector.select(timeout)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._expire()
        for key, _ in events:
            child: Child | None = key.data
            if child is None:
                for _number in self._signals.read():
                    self._end()
            elif not child.alive:
                continue
            elif key.fd == child.pidfd:
                self._bury(child)
            else:
                self._hear(child)

    def _hear(self, child: Child) -> None:
        messages = child.receive()
        if not messages:  # its end of the line is closed: it is dying, its death follows
            self._selector.unregister(child.lifeline)
        for message in messages:
            if isinstance(message, ChildReady):
                child.ready = True
                self._check_ready()
            elif isinstance(message, Drained):
                self._cut += message.unfinished
                self._drained(child)

    def _check_ready(self) -> None:
        if self._phase is Phase.STARTING and all(child.ready for child in self._children):
            self._phase = Phase.SERVING
            seconds = time.monotonic() - self._started
            names = ", ".join(self._settings.served_model_name)
            with contextlib.suppress(OSError):  # whoever read our output may have left
                print(
                    f"servelite {servelite.__version__} serves {names} at {url_of(self._listener)} "
                    f"(ready in {seconds:.1f} s)",
                    flush=True,
                )

    def _bury(self, child: Child) -> None:
        """A child has died. Unasked, it takes everything with it."""
        self._selector.unregister(child.pidfd)
        if child.lifeline.fileno() in self._selector.get_map():
            self._selector.unregister(child.lifeline)
        child.reap()
        self._undrained.discard(child)
        if self._phase is Phase.STOPPING:
            return
        self._culprit = self._culprit or child
        if self._phase is Phase.STARTING:  # nobody is served: what the other is still loading can go
            self._phase = Phase.STOPPING
            self._kill()
        elif child is self._engine and self._front_ends:
            for front_end in self._front_ends:
                front_end.send(EngineDown(self._epoch, child.death()))
            self._drain(0.0, _LAST_WORDS_S)
        else:
            self._stop()

    def _end(self) -> None:
        """A signal: drain; a second: cut what is in flight; a third, or before all is served: kill."""
        if self._phase is Phase.SERVING:
            self._asked = True
            delay, timeout = self._settings.drain_delay, self._settings.drain_timeout
            self._say(
                f"draining: {int(self._page.slots.sum())} answers in flight, up to {delay + timeout:g} s; "
                "a second signal ends at once"
            )
            self._drain(delay, timeout)
        elif self._phase is Phase.DRAINING and not self._hurried:
            self._hurried = True
            self._drain(0.0, 0.0)
        else:
            self._phase = Phase.STOPPING
            self._kill()

    def _drain(self, delay: float, timeout: float) -> None:
        self._phase = Phase.DRAINING
        grace = _HURRY_S if self._hurried else _DRAIN_GRACE_S
        self._deadline = time.monotonic() + delay + timeout + grace
        self._undrained = {child for child in self._front_ends if child.alive}
        for child in self._undrained:
            child.send(Drain(delay, timeout))
        if not self._undrained:
            self._stop()

    def _drained(self, child: Child) -> None:
        self._undrained.discard(child)
        if self._phase is Phase.DRAINING and not self._undrained:
            self._stop()

    def _stop(self) -> None:
        self._tell_drained()
        self._phase = Phase.STOPPING
        if not self._hurried:  # else its time goes on
            self._deadline = time.monotonic() + _STOP_S
        for child in self._children:
            child.send(Stop())

    def _expire(self) -> None:
        """The phase's time is over."""
        if self._phase is Phase.DRAINING and not self._hurried:
            self._stop()
        else:
            self._tell_drained()
            self._phase = Phase.STOPPING
            self._kill()

    def _tell_drained(self) -> None:
        """How a drain that was asked for has ended."""
        if self._phase is not Phase.DRAINING or not self._asked or self._culprit is not None:
            return
        if self._undrained:
            self._say("drained: time is over, clients that do not read are cut")
        else:
            self._say(f"drained: {self._cut or 'no'} answers were cut")

    def _kill(self) -> None:
        self._deadline = None
        for child in self._children:
            child.kill()

    def _say(self, text: str) -> None:
        """News for the log."""
        if self._settings.log_level in ("debug", "info"):
            with contextlib.suppress(OSError):  # whoever read our output may have left
                print(f"servelite: {text}", file=sys.stderr, flush=True)

    def _report(self) -> int:
        """The exit code; a death that nobody asked for is explained, last of all."""
        child = self._culprit
        if child is None:
            return ExitCode.OK
        if self._settings.debug and child.failed is not None and child.failed.traceback:
            print(child.failed.traceback, file=sys.stderr)
        if child.failed is None:
            print(f"servelite: the {child.name} failed: {child.death()}", file=sys.stderr)
            return ExitCode.CHILD_DIED
        if child.failed.exit_code in (ExitCode.SETTING, ExitCode.MODEL):  # the user's to mend: no name helps
            hint = f" ({child.failed.hint})" if child.failed.hint else ""
            print(f"servelite: {child.failed.message}{hint}", file=sys.stderr)
        else:
            print(f"servelite: the {child.name} failed: {child.death()}", file=sys.stderr)
        return child.failed.exit_code
