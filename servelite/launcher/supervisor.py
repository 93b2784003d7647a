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
from collections.abc import Iterator
from typing import Final

import servelite
from servelite.config import Settings
from servelite.ipc.messages import (
    ChildReady,
    Drain,
    Drained,
    EngineDown,
    EngineStalled,
    EngineUp,
    FrontEndGone,
    Passed,
    Quarantine,
    Resubmit,
    Stop,
)
from servelite.ipc.process import ExitCode
from servelite.ipc.progress import ProgressPage
from servelite.launcher.child import Child
from servelite.launcher.engine_life import EngineLife
from servelite.launcher.errors import LaunchError
from servelite.launcher.listen import check_certificate, open_listener, raise_descriptor_limit, url_of
from servelite.launcher.oom import oom_kills
from servelite.launcher.recovery import MOST_RESTARTS, WINDOW_S, GiveUp, Recovery, Release, Restart
from servelite.launcher.runtime_dir import runtime_folder
from servelite.launcher.signals import SignalPipe, ending_at_once, reap_orphans, reclaim_signals
from servelite.launcher.start import check_model, find_model, start_front_end
from servelite.launcher.watchdog import Verdict, Watchdog
from servelite.loader.resolve import is_local

_LOOK_S: Final = 0.5  # between looks at the engine's progress, or a quarter of --hang-timeout
_IDLE_LOOKS: Final = 4  # times rarer, while it has nothing to do: a wake-up of an idle machine is dear
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
        # It may take its time over a download. One of the hub's would wait for its threads.
        with contextlib.nullcontext() if is_local(settings.model) else ending_at_once():
            settings = find_model(settings)
        check_model(settings)
        check_certificate(settings)
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
        self._ledger: list[tuple[str, float]] = []  # start-up's phases and their seconds
        self._front_ends: list[Child] = []
        self._recovery = Recovery()
        self._restart_at: float | None = None  # when the engine is started again
        self._died_at = 0.0  # when it died last
        self._gave_up = ""  # why it is not started again
        self._oom_kills = oom_kills()
        self._look_every = min(_LOOK_S, settings.stall_warning / 4, settings.hang_timeout / 4)
        self._look_at: float | None = None  # when the engine is looked at next
        self._watchdog = Watchdog(settings.stall_warning, settings.hang_timeout, self._look_every)
        self._stalled = False
        self._replaced: list[float] = []  # when front ends were
        self._selector = selectors.DefaultSelector()

    def run(self, folder: str) -> int:
        """Start everything, return when nothing is left.

        Raises:
            LaunchError: the system has no room for the processes.
        """
        page = self._page = ProgressPage.create()
        self._folder = folder
        try:
            self._engine = self._start_engine(epoch=0)
            self._run()
        finally:
            self._selector.close()
            os.close(page.fd)
        return self._report()

    def _run(self) -> None:
        """Until nothing is left. The engine has been started."""
        try:
            for index in range(self._settings.api_workers):
                self._front_ends.append(self._watch(self._start_front_end(index)))
            self._selector.register(self._signals, selectors.EVENT_READ, None)
            while self._restart_at is not None or any(child.alive for child in self._children):
                self._step()
        finally:
            self._engine.end()
            for child in self._front_ends:
                child.kill()
                child.reap()

    def _start_engine(self, epoch: int) -> EngineLife:
        with _room_for_processes():
            life = EngineLife.start(self._settings, self._folder, self._page, epoch)
        for member in life.members:
            self._watch(member)
        return life

    def _watch(self, child: Child) -> Child:
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.lifeline, selectors.EVENT_READ, child)
        return child

    def _step(self) -> None:
        """Sleep until something happens, and act on it."""
        times = [at for at in (self._deadline, self._restart_at, self._look_at) if at is not None]
        events = self._selector.select(max(0.0, min(times) - time.monotonic()) if times else None)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._expire()
        if self._restart_at is not None and time.monotonic() >= self._restart_at:
            self._restart_engine()
        if self._look_at is not None and time.monotonic() >= self._look_at:
            self._look()
        for key, _ in events:
            child: Child | None = key.data
            if child is None:
                for _number in self._signals.read():
                    self._end()
                if os.getpid() == 1:
                    reap_orphans({child.pid for child in self._children})
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
                if self._phase is Phase.STARTING:
                    self._note_start(child, message)
                if child is self._engine.core and self._engine.boot.epoch:
                    self._introduce_engine()
                self._check_ready()
            elif isinstance(message, Passed):
                client = self._front_ends.index(child)
                self._release(self._recovery.passed([(client, number) for number in message.requests]))
            elif isinstance(message, Drained):
                self._cut += message.unfinished
                self._drained(child)

    def _look(self) -> None:
        """See whether the engine moves."""
        now = time.monotonic()
        self._look_at = now + self._look_every
        if self._engine.first_dead is not None or not self._engine.ready:
            return
        accepted, preparing = self._page.slots
        busy = bool((accepted > preparing).any())
        if not busy:
            self._look_at = now + _IDLE_LOOKS * self._look_every
        verdict = self._watchdog.look(now, progress=self._page.progress, busy=busy)
        if verdict is Verdict.HUNG:
            self._engine.kill(f"it hung: no progress for {self._watchdog.silence:.1f} s with work to do")
            self._watchdog.reset()
        elif (stalled := verdict is Verdict.STALLED) != self._stalled:
            self._stalled = stalled
            if stalled:
                self._warn(f"the engine has not moved for {self._watchdog.silence:.1f} s; not ready")
            else:
                self._say("the engine moves again")
            for front_end in self._front_ends:
                front_end.send(EngineStalled(stalled))

    def _note_start(self, child: Child, ready: ChildReady) -> None:
        self._ledger += [(f"{child.name}: {phase}", seconds) for phase, seconds in ready.ledger]
        self._ledger.append((f"{child.name} in all", time.monotonic() - child.started))

    def _check_ready(self) -> None:
        if self._phase is Phase.STARTING and all(child.ready for child in self._children):
            self._phase = Phase.SERVING
            first = min(child.started for child in self._children) - self._started
            for phase, took in [("launcher, until it starts them", first), *self._ledger]:
                self._say(f"start-up: {took:6.2f} s  {phase}")
            self._look_at = time.monotonic()
            seconds = time.monotonic() - self._started
            names = ", ".join(self._settings.served_model_name)
            url = url_of(self._listener, tls=bool(self._settings.ssl_certfile))
            with contextlib.suppress(OSError):  # whoever read our output may have left
                print(
                    f"servelite {servelite.__version__} serves {names} at {url} (ready in {seconds:.1f} s)",
                    flush=True,
                )

    def _bury(self, child: Child) -> None:
        """A child has died. Another takes its place, unless the server only starts, or it happens often."""
        self._selector.unregister(child.pidfd)
        if child.lifeline.fileno() in self._selector.get_map():
            self._selector.unregister(child.lifeline)
        child.reap()
        self._undrained.discard(child)
        of_engine = child in self._engine.members
        if of_engine:
            self._engine.lost(child)
        if self._phase is Phase.STOPPING:
            return
        if of_engine and self._phase is not Phase.STARTING:
            if not self._engine.alive:
                self._recover(self._engine)
            return
        if child in self._front_ends and self._phase is not Phase.STARTING and self._replace(child):
            return
        self._culprit = self._culprit or child
        if self._phase is Phase.STARTING:  # nobody is served: what the other is still loading can go
            self._phase = Phase.STOPPING
            self._kill()
        else:
            self._stop()

    def _recover(self, engine: EngineLife) -> None:
        """The engine has died: another one takes over its requests, unless it dies too often."""
        kills = oom_kills()
        inside = engine.died_from_inside or kills > self._oom_kills
        self._oom_kills = kills
        marks = self._page.steps_in_flight() if engine.ready else []
        in_flight = {key for mark in marks if mark.epoch == engine.boot.epoch for key in mark.requests}
        decision = self._recovery.died(time.monotonic(), inside=inside, in_flight=in_flight)
        down = EngineDown(engine.boot.epoch, engine.death(), final=isinstance(decision, GiveUp))
        for front_end in self._front_ends:
            front_end.send(down)
        if isinstance(decision, Restart) and decision.quarantined is not None:
            client, number = decision.quarantined
            self._front_ends[client].send(Quarantine(number, down.cause))
        self._died_at = time.monotonic()
        self._again(decision, f"the engine died: {down.cause}")

    def _again(self, decision: Restart | GiveUp, what: str) -> None:
        """`what` has happened: start the engine once more, or end."""
        if isinstance(decision, Restart):
            self._warn(f"{what}; starting it again")
            self._restart_at = time.monotonic() + decision.delay
        else:
            self._gave_up = f"; {decision.reason}"
            self._culprit = self._culprit or self._engine.first_dead
            self._drain(0.0, _LAST_WORDS_S)

    def _replace(self, front_end: Child) -> bool:
        """A front end has died, its connections with it. Whether the server goes on, with another one."""
        client = self._front_ends.index(front_end)
        self._engine.send(FrontEndGone(client, front_end.pid))
        self._page.slots[:, client] = 0
        self._release(self._recovery.forget(client))
        now = time.monotonic()
        self._replaced = [at for at in self._replaced if now - at < WINDOW_S] + [now]
        if len(self._replaced) > MOST_RESTARTS:
            return False
        if self._phase is Phase.DRAINING:  # nothing new comes in
            self._drained(front_end)
            return True
        self._warn(f"the {front_end.name} died: {front_end.death()}; starting it again")
        self._children.remove(front_end)
        self._front_ends[client] = self._watch(self._start_front_end(client))
        return True

    def _start_front_end(self, index: int) -> Child:
        with _room_for_processes():
            return start_front_end(index, self._engine.boot, self._listener)

    def _restart_engine(self) -> None:
        self._restart_at = None
        try:
            life = self._start_engine(self._engine.boot.epoch + 1)
        except LaunchError as error:
            self._again(self._recovery.died(time.monotonic(), inside=False, in_flight=()), str(error))
            return
        for member in self._engine.members:
            self._children.remove(member)
        self._engine = life
        self._watchdog.reset()
        self._stalled = False

    def _introduce_engine(self) -> None:
        """The new engine is ready: it gets the old one's requests."""
        self._say(
            f"a new engine is up, {time.monotonic() - self._died_at:.1f} s after; "
            f"{int(self._page.slots[0].sum())} answers go on"
        )
        for front_end in self._front_ends:
            front_end.send(EngineUp(self._engine.boot.engine_address, self._engine.boot.epoch))
        self._release(self._recovery.up())

    def _release(self, release: Release | None) -> None:
        """Let front ends resubmit whom the new engine may have."""
        if release is None:
            return
        for client, front_end in enumerate(self._front_ends):
            if release.keys is None:
                front_end.send(Resubmit())
            elif numbers := tuple(sorted(number for owner, number in release.keys if owner == client)):
                front_end.send(Resubmit(numbers))

    def _end(self) -> None:
        """A signal: drain; a second: cut what is in flight; a third, or before all is served: kill."""
        if self._phase is Phase.SERVING:
            self._asked = True
            delay, timeout = self._settings.drain_delay, self._settings.drain_timeout
            self._say(
                f"draining: {int(self._page.slots[0].sum())} answers in flight, up to {delay + timeout:g} s; "
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
        self._restart_at = self._look_at = None
        self._tell_drained()
        self._phase = Phase.STOPPING
        if not self._hurried:  # else its time goes on
            self._deadline = time.monotonic() + _STOP_S
        self._engine.send(Stop())
        for front_end in self._front_ends:
            front_end.send(Stop())

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
        self._deadline = self._restart_at = self._look_at = None
        for child in self._children:
            child.kill()

    def _say(self, text: str) -> None:
        """News for the log."""
        if self._settings.log_level in ("debug", "info"):
            _print(text)

    def _warn(self, text: str) -> None:
        """Bad news for the log."""
        if self._settings.log_level != "error":
            _print(text)

    def _report(self) -> int:
        """The exit code; a death that nobody asked for is explained, last of all."""
        child = self._culprit
        if child is None:
            return ExitCode.OK
        failed, text = child.failed, f"the {child.name} failed: {child.death()}{self._gave_up}"
        if failed is not None and self._settings.debug and failed.traceback:
            print(failed.traceback, file=sys.stderr)
        if failed is not None and failed.exit_code in (ExitCode.SETTING, ExitCode.MODEL):
            # The user's to mend: no name helps.
            text = failed.message + (f" ({failed.hint})" if failed.hint else "")
        print(f"servelite: {text}", file=sys.stderr)
        return ExitCode.CHILD_DIED if failed is None else failed.exit_code


@contextlib.contextmanager
def _room_for_processes() -> Iterator[None]:
    """Around a start of processes, and nothing else: what the system refuses it is a `LaunchError`."""
    try:
        yield
    except OSError as error:
        text = f"no room for its processes: {error.strerror}; raise the limits on them (ulimit -n, -u)"
        raise LaunchError(text, ExitCode.INTERNAL) from None


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # whoever read our output may have left
        print(f"servelite: {text}", file=sys.stderr, flush=True)
