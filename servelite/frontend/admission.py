"""Whether one more request may come in: the bounded number of accepted and unfinished requests.

Each front end keeps its count in its slot of the progress page; the sum over all slots is compared
with what may run and wait, so that a refusal waits for no engine step. Two front ends that decide at
the same instant may overshoot by one each.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from servelite.frontend.errors import QUEUE_FULL, APIError, bad_request

_REMEMBERED: Final = 64  # ends of requests that the drain rate is taken from
_MAX_RETRY_S: Final = 60.0


class Place:
    """One accepted request's place; given back once, however often `leave` is called."""

    def __init__(self, admission: Admission | None) -> None:
        """`admission`: None for a request that runs in the place of another one."""
        self._admission = admission

    def leave(self) -> None:
        """The request has ended."""
        if self._admission is not None:
            self._admission.left()
            self._admission = None


class Admission:
    """One front end's side of the door."""

    def __init__(
        self, slots: npt.NDArray[np.int64], client: int, max_num_seqs: int, max_waiting: int
    ) -> None:
        """`slots`: the progress page's."""
        self._slots, self._preparing = slots
        self._client = client
        self._max_num_seqs = max_num_seqs
        self.limit: int = max_num_seqs + max_waiting
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)
        slots[:, client] = 0

    @property
    def accepted(self) -> int:
        """This front end's accepted and unfinished requests."""
        return int(self._slots[self._client])

    def enter(self, count: int = 1) -> list[Place]:
        """Places for `count` more requests, all or none.

        Raises:
            APIError: 503 with Retry-After, as many requests as may run and wait are there; 400, so
                many can never be there at once.
        """
        if count > self.limit:
            raise bad_request(
                f"The request asks for {count} answers; this server takes at most {self.limit} at once "
                "(prompts times n)",
                "n",
                "too_many_answers",
            )
        if int(self._slots.sum()) + count > self.limit:
            raise APIError(
                503,
                f"The server is at its limit of {self.limit} requests running and waiting; try again later.",
                code=QUEUE_FULL,
                headers=(("retry-after", str(self.retry_after())),),
            )
        self._slots[self._client] += count
        return [Place(self) for _ in range(count)]

    @contextmanager
    def preparing(self, count: int) -> Iterator[None]:
        """Meanwhile `count` of the accepted requests are not at the engine."""
        self._preparing[self._client] += count
        try:
            yield
        finally:
            self._preparing[self._client] -= count

    def left(self) -> None:
        """A place was given back (called by `Place` only)."""
        self._slots[self._client] -= 1
        self._ends.append(time.monotonic())

    def retry_after(self) -> int:
        """Seconds until about half of those waiting have had their turn, at the recent rate of ends.

        Jittered upwards, so that those refused together do not come back together.
        """
        total = int(self._slots.sum())
        if len(self._ends) < 2:
            seconds = 1.0
        else:
            rate = len(self._ends) / max(time.monotonic() - self._ends[0], 1e-3)
            seconds = max(1.0, (total - self._max_num_seqs) / 2 / rate)
        return round(min(seconds, _MAX_RETRY_S) * random.uniform(1.0, 1.5))
