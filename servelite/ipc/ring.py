"""A ring of shared memory from one process to several: whole messages, in order, each read by every reader.

Memory and eventfds without names, inherited as descriptors, so that nothing is left when the last holder
dies. Every frame is one count in each reader's eventfd: a reader sleeps in the kernel until it has one, and
the eventfd's lock orders the writer's bytes before the reader's look at them. What a reader has read stands
in a word of its own; the writer, where it finds no room, sets a flag and sleeps until a reader that sees the
flag wakes it. Positions are bytes since the ring was made and only grow; a ring has one writer in its life.

A reader's position is written when its copy is made, and x86-64 keeps that order. On aarch64, where nothing
but the microseconds until the writer comes round keeps it, this is untested.

The memory: a line for the writer's flag, a line for each reader's position, then the data. A frame is a word
(length, and whether the message goes on in the next frame) and the bytes, padded to whole words.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
from collections import deque
from collections.abc import Sequence
from typing import Final

from servelite.ipc.messages import RingFds

CAPACITY: Final = 1 << 20  # bytes of a ring's data
MAX_MESSAGE: Final = 1 << 28  # bytes; the masks of 4,096 rows of a vocabulary of 262,144 are half of it
_LINE: Final = 64  # bytes that no two processes write both
_WORD: Final = 8
_CONTINUES: Final = 1 << 32  # in a frame's first word, above its length
_NAP_MS: Final = 50  # at most, for a writer; it bounds what a wake lost between flag and sleep could cost


class RingError(RuntimeError):
    """The memory does not hold what a writer of ours would have written."""


def create_ring(readers: int, capacity: int = CAPACITY) -> RingFds:
    """A new, empty ring; the descriptors are not inheritable but by `pass_fds`.

    Args:
        capacity: bytes of data, a multiple of 32, at least 64.

    Raises:
        OSError: the system has no room for it; nothing of it is left.
    """
    with contextlib.ExitStack() as undo:
        memory = os.memfd_create("servelite-ring", os.MFD_CLOEXEC)
        undo.callback(os.close, memory)
        os.ftruncate(memory, _LINE * (1 + readers) + capacity)
        wakes = []
        for _ in range(readers):
            wakes.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE))
            undo.callback(os.close, wakes[-1])
        space = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        undo.pop_all()
    return RingFds(memory, tuple(wakes), space)


class _View:
    """One process's view of the memory, and the frame's arithmetic. It does not own the descriptors."""

    def __init__(self, fds: RingFds) -> None:
        self.base = _LINE * (1 + len(fds.readers))
        self.capacity = os.fstat(fds.memory).st_size - self.base
        if self.capacity < 64 or self.capacity % 32:
            raise ValueError(f"descriptor {fds.memory} holds no ring of {len(fds.readers)} readers")
        self.most = (
            self.capacity // 4 - _WORD
        )  # bytes in a frame: readers start before a message is all there
        self._map = mmap.mmap(fds.memory, self.base + self.capacity)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("Q")

    @staticmethod
    def frame_size(length: int) -> int:
        """The bytes that a frame of `length` takes."""
        return _WORD + (length + _WORD - 1) // _WORD * _WORD

    @staticmethod
    def position_of(reader: int) -> int:
        """The word that says how far a reader is; word 0 is the writer's flag."""
        return _LINE * (1 + reader) // _WORD

    def close(self) -> None:
        self.words.release()
        self.bytes.release()
        self._map.close()


class RingReader:
    """One reader's end. Used by one thread."""

    def __init__(self, fds: RingFds, index: int) -> None:
        self._view = _View(fds)
        self._wake, self._space = fds.readers[index], fds.space
        self._word = self._view.position_of(index)
        self._position = 0
        self._messages: deque[bytes] = deque()  # whole ones that `recv` has not given
        self._parts = bytearray()  # of the message under way

    def fileno(self) -> int:
        """For pollers: readable when a frame waits."""
        return self._wake

    def recv(self) -> bytes:
        """The next message, waiting for it.

        Raises:
            RingError: the memory holds no frame of ours.
        """
        while not self._messages:
            self.take_in()
        return self._messages.popleft()

    def take_in(self) -> None:
        """Move one frame, waiting for it, from the ring to this process's memory.

        Raises:
            RingError: the memory holds no frame of ours.
        """
        os.eventfd_read(self._wake)
        view = self._view
        at = self._position % view.capacity
        header = view.words[(view.base + at) // _WORD]
        length, continues = header & (_CONTINUES - 1), header >= _CONTINUES
        if length > view.most or header > _CONTINUES + view.most:
            raise RingError(f"a frame of {length} bytes; the ring's largest is {view.most}")
        if len(self._parts) + length > MAX_MESSAGE:
            raise RingError(f"a message beyond {MAX_MESSAGE} bytes")
        start = view.base + (at + _WORD) % view.capacity
        end = view.base + view.capacity
        frame = bytes(view.bytes[start : min(start + length, end)])
        if len(frame) < length:
            frame += view.bytes[view.base : view.base + length - len(frame)]
        self._position += view.frame_size(length)
        view.words[self._word] = self._position  # from here on the writer may write over it
        if view.words[0]:
            os.eventfd_write(self._space, 1)
        if continues or self._parts:
            self._parts += frame
            if continues:
                return
            frame = bytes(self._parts)
            self._parts.clear()
        self._messages.append(frame)

    def close(self) -> None:
        """Let go of the memory; the descriptors stay their owner's."""
        self._view.close()


class RingWriter:
    """The writer's end. Used by one thread."""

    def __init__(self, fds: RingFds) -> None:
        self._view = _View(fds)
        self._wakes, self._space = fds.readers, fds.space
        self._words = [self._view.position_of(reader) for reader in range(len(fds.readers))]
        self._position = 0
        self._slowest = 0  # a reader's position, as last looked at: it may be further

    def send(self, message: bytes, meanwhile: Sequence[RingReader] = ()) -> None:
        """Write one message; waits, without limit, for the slowest reader where there is no room.

        Args:
            meanwhile: rings whose frames are taken in during such a wait: who writes to this process
                while it writes to them is never waited for in vain.

        Raises:
            ValueError: it is larger than MAX_MESSAGE.
        """
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes; a ring's limit is {MAX_MESSAGE}")
        view, rest = self._view, memoryview(message)
        while len(rest) > view.most:
            self._put(rest[: view.most], _CONTINUES, meanwhile)
            rest = rest[view.most :]
        self._put(rest, 0, meanwhile)

    def _put(self, part: memoryview, continues: int, meanwhile: Sequence[RingReader]) -> None:
        view, length = self._view, len(part)
        size = view.frame_size(length)
        if not self._has_room(size):
            self._wait_for_room(size, meanwhile)
        at = self._position % view.capacity
        view.words[(view.base + at) // _WORD] = length | continues
        start = view.base + (at + _WORD) % view.capacity
        fits = min(length, view.base + view.capacity - start)
        view.bytes[start : start + fits] = part[:fits]
        view.bytes[view.base : view.base + length - fits] = part[fits:]
        self._position += size
        for wake in self._wakes:
            os.eventfd_write(wake, 1)

    def _has_room(self, size: int) -> bool:
        limit = self._position + size - self._view.capacity
        if self._slowest < limit:
            self._slowest = min(self._view.words[word] for word in self._words)
        return self._slowest >= limit

    def _wait_for_room(self, size: int, meanwhile: Sequence[RingReader]) -> None:
        """The flag first, then a look, then sleep: a reader moves first and looks at the flag then."""
        words, poller = self._view.words, select.poll()
        arriving = {reader.fileno(): reader for reader in meanwhile}
        for fd in (self._space, *arriving):
            poller.register(fd, select.POLLIN)
        words[0] = 1
        while not self._has_room(size):
            for fd, _ in poller.poll(_NAP_MS):
                if fd == self._space:
                    os.eventfd_read(fd)
                else:
                    arriving[fd].take_in()
        words[0] = 0

    def close(self) -> None:
        """Let go of the memory; the descriptors stay their owner's."""
        self._view.close()
