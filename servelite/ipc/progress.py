"""The progress page: what can be known of an engine that has died or hangs.

Shared memory by memfd (no name, nothing to clean up), owned by the launcher. The engine writes each
step it is about to run and whose requests are in it, before `forward`, and which step has completed;
the launcher and the front ends read. One writer a field; a sequence number, odd while a write is
under way, guards the steps.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_FRONT_ENDS: Final = 64
MAX_IN_FLIGHT: Final = 8  # steps; the largest --async-depth
MAX_STEP_REQUESTS: Final = 4096  # the largest --max-num-seqs
_SEQ, _EPOCH, _COMPLETED, _PROGRESS = range(4)
_HEADER: Final = 8  # int64 words
_STEP, _TIME, _COUNT = range(3)
_STEP_HEADER: Final = 4
_STEP_WORDS: Final = _STEP_HEADER + 2 * MAX_STEP_REQUESTS
_SLOTS: Final = 2 * MAX_FRONT_ENDS
_BYTES: Final = (_HEADER + _SLOTS + MAX_IN_FLIGHT * _STEP_WORDS) * 8


@dataclass(frozen=True)
class StepMark:
    """A step that was started and has not completed."""

    epoch: int
    step: int
    monotonic_ns: int  # when it was started
    requests: tuple[tuple[int, int], ...]  # (client, request)


class ProgressPage:
    """One process's view of the page."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _BYTES)
        words: npt.NDArray[np.int64] = np.frombuffer(self._map, dtype=np.int64)
        self._words = words[:_HEADER]
        self.slots = words[_HEADER : _HEADER + _SLOTS].reshape(2, MAX_FRONT_ENDS)
        """Of each front end its accepted and unfinished requests; and how many of these it still prepares,
        so that the engine knows nothing of them. Each writes its own slots only."""
        self._ring = words[_HEADER + _SLOTS :].reshape(MAX_IN_FLIGHT, _STEP_WORDS)

    @classmethod
    def create(cls) -> ProgressPage:
        """A zeroed page in a new memfd (inheritable only by `pass_fds`)."""
        fd = os.memfd_create("servelite-progress", os.MFD_CLOEXEC)
        os.ftruncate(fd, _BYTES)
        return cls(fd)

    @classmethod
    def attach(cls, fd: int) -> ProgressPage:
        """The page behind an inherited descriptor.

        Raises:
            ValueError: the descriptor is no progress page of this version.
        """
        if os.fstat(fd).st_size != _BYTES:
            raise ValueError(f"descriptor {fd} holds no progress page")
        return cls(fd)

    def begin_epoch(self, epoch: int) -> None:
        """Engine only: a new life; the steps of the one before are forgotten."""
        self._words[_SEQ] += 1
        self._words[_EPOCH], self._words[_COMPLETED] = epoch, 0
        self._ring[:, :_STEP_HEADER] = 0
        self._words[_SEQ] += 1

    def start_step(self, step: int, clients: npt.ArrayLike, numbers: npt.ArrayLike) -> None:
        """Engine only: the step (from 1) about to run. `clients`, `numbers`: 1-D, of equal length."""
        entry, count = self._ring[step % MAX_IN_FLIGHT], len(np.asarray(clients))
        self._words[_SEQ] += 1
        entry[_STEP], entry[_TIME], entry[_COUNT] = step, time.monotonic_ns(), count
        pairs = entry[_STEP_HEADER:].reshape(2, MAX_STEP_REQUESTS)
        pairs[0, :count], pairs[1, :count] = clients, numbers
        self._words[_SEQ] += 1
        self._words[_PROGRESS] += 1

    def complete_step(self, step: int) -> None:
        """Engine only: the step's result is in."""
        self._words[_COMPLETED] = step
        self._words[_PROGRESS] += 1

    def beat(self) -> None:
        """Engine only: the step under way moves. Threads may lose one another's count, never the change."""
        self._words[_PROGRESS] += 1

    @property
    def progress(self) -> int:
        """Grows whenever the engine moves."""
        return int(self._words[_PROGRESS])

    def steps_in_flight(self) -> list[StepMark]:
        """The steps started and not completed, oldest first; a reader that meets a write reads again.

        A writer that died half-way leaves the number odd: after some tries the page is read as it is.
        """
        for _ in range(100):
            before = int(self._words[_SEQ])
            marks = self._copy()
            if before % 2 == 0 and int(self._words[_SEQ]) == before:
                return marks
            time.sleep(0.0001)
        return self._copy()

    def _copy(self) -> list[StepMark]:
        epoch, completed = int(self._words[_EPOCH]), int(self._words[_COMPLETED])
        marks = []
        for entry in self._ring:
            if entry[_STEP] > completed:
                count = min(max(int(entry[_COUNT]), 0), MAX_STEP_REQUESTS)
                pairs = entry[_STEP_HEADER:].reshape(2, MAX_STEP_REQUESTS)[:, :count].T.tolist()
                requests = tuple((int(client), int(number)) for client, number in pairs)
                marks.append(StepMark(epoch, int(entry[_STEP]), int(entry[_TIME]), requests))
        return sorted(marks, key=lambda mark: mark.step)
