"""What an engine and its ranks say to one another: plans out, results in, through rings.

The launcher makes a group's descriptors for one life of the engine, and every process of it inherits them.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from servelite.ipc.messages import FromRank, Plan, RankGroup, RingFds
from servelite.ipc.ring import RingReader, RingWriter, create_ring


def open_group(size: int) -> RankGroup:
    """New descriptors for an engine and `size` ranks; not inheritable but by `pass_fds`.

    Raises:
        OSError: the system has no room for them; nothing of them is left.
    """
    with contextlib.ExitStack() as undo:
        rings = []
        for readers in (size, *[1] * size):
            rings.append(create_ring(readers))
            undo.callback(_close, rings[-1])
        collective = os.memfd_create("servelite-collective", os.MFD_CLOEXEC)
        undo.pop_all()
    return RankGroup(rings[0], tuple(rings[1:]), collective)


def _close(ring: RingFds) -> None:
    for fd in (ring.memory, *ring.readers, ring.space):
        os.close(fd)


def close_group(group: RankGroup) -> None:
    """Close this process's descriptors of the group; what others of it have stays open."""
    for fd in group.fds:
        os.close(fd)


class EngineEnd:
    """The engine's end. Used by one thread."""

    def __init__(self, group: RankGroup) -> None:
        self._plans = RingWriter(group.plans)
        self._results = [RingReader(fds, 0) for fds in group.results]
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)

    def send_plan(self, plan: Plan) -> None:
        """To every rank. Ranks that have large results to write are listened to while it waits for room."""
        self._plans.send(self._encoder.encode(plan), self._results)

    def send_masks(self, masks: bytes) -> None:
        """To every rank, behind a plan that needs them."""
        self._plans.send(masks, self._results)

    def recv(self, rank: int) -> FromRank:
        """The rank's next message, waiting for it.

        Raises:
            msgspec.ValidationError: it is none of ours.
        """
        return self._decoder.decode(self._results[rank].recv())

    def close(self) -> None:
        """Let go of the memory."""
        self._plans.close()
        for ring in self._results:
            ring.close()


class RankEnd:
    """One rank's end. Used by one thread."""

    def __init__(self, group: RankGroup, rank: int) -> None:
        self._plans = RingReader(group.plans, rank)
        self._results = RingWriter(group.results[rank])
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Plan)

    def recv_plan(self) -> Plan:
        """The next plan, waiting for it.

        Raises:
            msgspec.ValidationError: it is none of ours.
        """
        return self._decoder.decode(self._plans.recv())

    def recv_masks(self) -> bytes:
        """The masks behind a plan that needs them."""
        return self._plans.recv()

    def send(self, message: FromRank) -> None:
        """To the engine."""
        self._results.send(self._encoder.encode(message))

    def close(self) -> None:
        """Let go of the memory."""
        self._plans.close()
        self._results.close()
