"""The ZeroMQ sockets between front ends and the engine core.

One ROUTER at the engine, one DEALER at each front end, so that a message to a front end that is
gone is an error the engine sees, not a silent drop. A peer's identity is its client number and its
process, so that a restarted front end is another peer.
"""

from __future__ import annotations

import os
import struct
from typing import Any, Final

import msgspec
import zmq

from servelite.ipc.messages import FromEngine, ToEngine

_IDENTITY: Final = struct.Struct("<BIQ")  # a first byte that is never 0 (ZeroMQ keeps that)
_HIGH_WATER: Final = 100_000  # messages to one front end before it is taken for lost
_encoder = msgspec.msgpack.Encoder()
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_to_engine = msgspec.msgpack.Decoder(ToEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """A message as one frame."""
    return _encoder.encode(message)


def decode_from_engine(frame: bytes | memoryview) -> FromEngine:
    """A frame from the engine. Raises msgspec.DecodeError or ValidationError."""
    return _from_engine.decode(frame)


def decode_to_engine(frame: bytes | memoryview) -> ToEngine:
    """A frame from a front end. Raises msgspec.DecodeError or ValidationError."""
    return _to_engine.decode(frame)


def engine_address(runtime_dir: str, index: int, epoch: int) -> str:
    """Where engine `index` listens in its life `epoch`.

    Raises:
        ValueError: the path is longer than a Unix socket's may be.
    """
    path = os.path.join(runtime_dir, f"engine-{index}-{epoch}.sock")
    if len(os.fsencode(path)) > 100:
        raise ValueError(f"the socket path {path} is over 100 bytes: choose a shorter --runtime-dir")
    return f"ipc://{path}"


def peer_identity(client: int, pid: int) -> bytes:
    """How the engine's socket knows a front end: another process, another peer."""
    return _IDENTITY.pack(1, client, pid)


def connect_engine(address: str, client: int) -> zmq.Socket[bytes]:
    """A front end's socket. Its first message must be `Hello`."""
    sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    sock.setsockopt(zmq.IDENTITY, peer_identity(client, os.getpid()))
    sock.setsockopt(zmq.LINGER, 200)
    sock.setsockopt(zmq.SNDHWM, 0)  # what may be in flight is bounded by admission
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.connect(address)
    return sock


class PeerGone(ConnectionError):
    """The front end a message was for is not there any more, or has stopped reading."""


class EngineSocket:
    """The engine's end. Used by the engine loop's thread only."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context()
        self._sock: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._sock.setsockopt(zmq.LINGER, 200)
        self._sock.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._sock.setsockopt(zmq.RCVHWM, 0)
        self._sock.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._sock, zmq.POLLIN)

    def watch(self, fd: int) -> None:
        """Also wake `wait` when `fd` is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_ms: int | None) -> list[Any]:
        """Sleep until a message or a watched descriptor is ready; returns the ready descriptors.

        None waits without limit. The socket itself is not in the list: `recv` finds what it has.
        """
        return [ready for ready, _ in self._poller.poll(timeout_ms) if ready is not self._sock]

    def recv(self) -> tuple[bytes, bytes] | None:
        """(peer, frame), or None if nothing waits."""
        try:
            peer, frame = self._sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        except ValueError:  # a peer that sends another number of frames speaks no language of ours
            return b"", b""
        return peer, frame

    def send(self, peer: bytes, frame: bytes) -> None:
        """Queue a frame for a peer; never waits.

        Raises:
            PeerGone: it is not connected, or has 100,000 messages unread.
        """
        try:
            self._sock.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerGone(str(error)) from None

    def close(self) -> None:
        """Close, and remove the socket's file."""
        self._sock.close()
        self._context.term()
        path = self._address.removeprefix("ipc://")
        if os.path.exists(path):
            os.unlink(path)
