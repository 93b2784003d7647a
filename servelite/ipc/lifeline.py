"""The launcher's line to each child: boot message down, state and errors up, and proof of life.

A SOCK_SEQPACKET socket pair: one packet is one message, and the kernel tells each end at once when
the other is gone, however it died.
"""

from __future__ import annotations

import select
import socket
from typing import Final

import msgspec

from servelite.ipc.messages import FromChild, ToChild

_Message = ToChild | FromChild
_MAX_PACKET: Final = 1 << 17  # below the kernel's default send buffer
_MAX_TEXT: Final = 1 << 14  # of one string in a ChildFailed


class Lifeline:
    """One end of the pair. Blocking, and used by one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Message)

    @classmethod
    def from_fd(cls, fd: int) -> Lifeline:
        """The child's end, from the descriptor it inherited."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """For selectors: readable when a message, or the other end's death, waits."""
        return self._sock.fileno()

    def send(self, message: _Message) -> bool:
        """Send one message; False if the other end is gone.

        Raises:
            ValueError: the message is larger than one packet may be.
        """
        frame = self._encoder.encode(message)
        if len(frame) > _MAX_PACKET:
            raise ValueError(f"a lifeline message of {len(frame)} bytes; the limit is {_MAX_PACKET}")
        try:
            self._sock.send(frame, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def recv(self) -> _Message | None:
        """The next message, waiting for it; None: the other end is gone."""
        try:
            frame = self._sock.recv(_MAX_PACKET)
        except ConnectionResetError:
            return None
        return self._decoder.decode(frame) if frame else None

    @property
    def other_end_gone(self) -> bool:
        """Whether the other end is closed, whatever it sent before and nobody has read."""
        poller = select.poll()
        poller.register(self._sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Close this end; the other reads None."""
        self._sock.close()


def lifeline_pair() -> tuple[Lifeline, int]:
    """The launcher's end, and the inheritable descriptor of the child's end.

    The launcher closes the descriptor once the child runs, or it would never read the child's death.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = theirs.detach()
    return Lifeline(ours), fd


def clip(text: str) -> str:
    """`text` short enough for a field of a lifeline message, its end kept."""
    return text if len(text) <= _MAX_TEXT else "..." + text[-_MAX_TEXT:]
