"""What follows a death of the engine: when it is started again, and who is resubmitted to it.

No process, clock or message here: the supervisor reports what happened and acts on what it is told.

A death from inside (its own error, a crash, a hang, out of memory) accuses the requests that were in
its steps in flight. While there are suspects, only a part of them runs, a *probe*, and everybody else
waits: first one half, and if the engine dies again, one half of those that were in flight then. A probe
whose requests have each had a token is cleared. A request under which the engine dies when it runs
alone, having been a suspect before, is quarantined. A death from outside accuses nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

Key = tuple[int, int]
"""(client, request)."""

WINDOW_S: Final = 600.0
MOST_RESTARTS: Final = 5
"""Restarts within the window, those of a search not counted; the next death ends the server."""
_BACK_OFF_S: Final = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Before the first restart of the window, the second, ..."""
_MOST_FRUITLESS: Final = 5
"""Quarantines in a row without a request that passed: then it is the engine, not the requests."""


@dataclass(frozen=True)
class Restart:
    """Start the engine again, after `delay` seconds."""

    delay: float = 0.0
    quarantined: Key | None = None


@dataclass(frozen=True)
class GiveUp:
    """It dies too often: end the server."""

    reason: str


@dataclass(frozen=True)
class Release:
    """Whom to resubmit to the engine that is up: `keys`, or all where it is None."""

    keys: frozenset[Key] | None


class Recovery:
    """One server's engine, over all its lives."""

    def __init__(self) -> None:
        self._restarts: deque[float] = deque()
        self._suspects: list[Key] = []
        self._probe: frozenset[Key] = frozenset()
        self._untried: set[Key] = set()  # of the probe: those without a token yet
        self._fruitless = 0
        self._is_up = True

    @property
    def searching(self) -> bool:
        """Whether there are suspects."""
        return bool(self._suspects)

    def died(self, now: float, *, inside: bool, in_flight: Collection[Key]) -> Restart | GiveUp:
        """The engine has died.

        Args:
            now: seconds, a monotonic clock.
            inside: not by somebody else's signal.
            in_flight: the requests of its steps in flight.
        """
        was_up, self._is_up = self._is_up, False
        if not (inside and was_up and (in_flight or self.searching)):
            return self._plain_restart(now)
        if not self.searching:
            self._suspects = sorted(in_flight)
            return Restart()
        blamed = self._probe.intersection(in_flight) or self._probe
        if len(blamed) > 1 or not blamed.issuperset(in_flight):
            self._suspects = sorted(blamed)  # again, with nobody beside them
            return Restart()
        (culprit,) = blamed
        self._suspects = []
        self._fruitless += 1
        if self._fruitless > _MOST_FRUITLESS:
            return GiveUp(f"it died under {self._fruitless} requests in a row, each of which ran alone")
        return Restart(quarantined=culprit)

    def _plain_restart(self, now: float) -> Restart | GiveUp:
        while self._restarts and now - self._restarts[0] > WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) == MOST_RESTARTS:
            return GiveUp(f"it died too often: {MOST_RESTARTS + 1} times in {WINDOW_S / 60:.0f} minutes")
        self._restarts.append(now)
        return Restart(_BACK_OFF_S[len(self._restarts) - 1])

    def up(self) -> Release:
        """The engine is ready: whom it gets."""
        self._is_up = True
        return self._next()

    def passed(self, keys: Collection[Key]) -> Release | None:
        """These have had a token from the new engine, or have ended; maybe others may follow now."""
        if not self.searching:
            return None
        self._fruitless = 0
        ended = set(keys) - self._probe
        self._suspects = [key for key in self._suspects if key not in ended]
        self._untried.difference_update(keys)
        if self._untried or not self._is_up:
            return None
        self._suspects = [key for key in self._suspects if key not in self._probe]
        return self._next()

    def forget(self, client: int) -> Release | None:
        """A front end is dead, and its requests with it."""
        return self.passed([key for key in {*self._suspects, *self._untried} if key[0] == client])

    def _next(self) -> Release:
        if not self._suspects:
            self._probe, self._untried = frozenset(), set()
            return Release(None)
        self._probe = frozenset(self._suspects[: (len(self._suspects) + 1) // 2])
        self._untried = set(self._probe)
        return Release(self._probe)
