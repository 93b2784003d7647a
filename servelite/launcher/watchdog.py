"""Whether the engine moves: told from its progress count, the work the front ends know of, and a clock.

No clock of its own: the supervisor looks regularly. Silence is counted from look to look, and a look that
comes late counts as one that was in time: whoever was descheduled itself cannot say that others stood
still.
"""

from __future__ import annotations

import enum
from typing import Final

_STALL_FACTOR: Final = 5.0  # of the slowest step seen


class Verdict(enum.IntEnum):
    """What is to be thought of the engine."""

    MOVES = 0  # or has nothing to do
    STALLED = 1  # longer than any step so far took
    HUNG = 2


class Watchdog:
    """Watches one engine over all its lives."""

    def __init__(self, stall_warning: float, hang_timeout: float, interval: float) -> None:
        """All in seconds; `interval`: between looks."""
        self._stall_warning = stall_warning
        self._hang_timeout = hang_timeout
        self._interval = interval
        self._slowest = 0.0
        self.reset()

    def reset(self) -> None:
        """Another engine: nothing is known of it."""
        self._progress = -1
        self._looked: float | None = None
        self.silence = 0.0
        """Seconds without progress, while there was work."""

    def look(self, now: float, *, progress: int, busy: bool) -> Verdict:
        """
        Args:
            now: a monotonic clock.
            progress: grows whenever the engine moves.
            busy: front ends have requests that it has not finished.
        """
        passed = 0.0 if self._looked is None else min(now - self._looked, 2 * self._interval)
        self._looked = now
        if progress != self._progress or not busy:
            if busy and self._progress >= 0:
                self._slowest = max(self._slowest, self.silence)
            self._progress, self.silence = progress, 0.0
            return Verdict.MOVES
        self.silence += passed
        if self.silence >= self._hang_timeout:
            return Verdict.HUNG
        stalled = self.silence >= max(self._stall_warning, _STALL_FACTOR * self._slowest)
        return Verdict.STALLED if stalled else Verdict.MOVES
