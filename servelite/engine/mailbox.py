"""Where the loop's messages come from and go to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

import msgspec

from servelite.ipc.lifeline import Lifeline
from servelite.ipc.messages import CONTRACT_VERSION, Abort, Add, FrontEndGone, Hello, Outputs, Ready, Stop
from servelite.ipc.sockets import EngineSocket, PeerGone, decode_to_engine, encode, peer_identity

log = logging.getLogger(__name__)


class ClientGone(msgspec.Struct, frozen=True):
    """A front end is not there any more."""


Event = Add | Abort | ClientGone | Stop


class Mailbox(Protocol):
    """The loop's view of the front ends and the launcher."""

    def receive(self, timeout: float | None) -> Iterator[tuple[int, Event]]:
        """What has come, as (client, event).

        Waits for the first up to `timeout` seconds (None: for ever, 0: not at all).
        """

    def send(self, client: int, outputs: Outputs) -> None:
        """Queue a message for a front end; never waits."""

    def clients(self) -> list[int]:
        """The front ends that are connected."""


class SocketMailbox:
    """The real `Mailbox`: a ROUTER socket, and the launcher's lifeline."""

    def __init__(self, sock: EngineSocket, lifeline: Lifeline, ready: Ready) -> None:
        self._sock, self._lifeline = sock, lifeline
        self._ready = encode(ready)
        self._peers: dict[int, bytes] = {}  # by client
        self._clients: dict[bytes, int] = {}  # by peer
        self._gone: list[int] = []
        sock.watch(lifeline.fileno())

    def receive(self, timeout: float | None) -> Iterator[tuple[int, Event]]:
        """See `Mailbox`. A frame that cannot be read is logged and dropped."""
        if self._gone:
            timeout = 0
        if self._sock.wait(None if timeout is None else max(0, round(timeout * 1000))):
            message = self._lifeline.recv()
            if message is None or isinstance(message, Stop):
                yield -1, Stop()
            elif isinstance(message, FrontEndGone) and self._peers.get(message.client) == peer_identity(
                message.client, message.pid
            ):
                self._forget(message.client)
        while (received := self._sock.recv()) is not None:
            yield from self._read(*received)
        while self._gone:
            yield self._gone.pop(), ClientGone()

    def _read(self, peer: bytes, frame: bytes) -> Iterator[tuple[int, Event]]:
        try:
            message = decode_to_engine(frame)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            log.error("dropped a frame of %d bytes that is no message: %s", len(frame), error)
            return
        if isinstance(message, Hello):
            self._welcome(peer, message)
        elif peer in self._clients:
            yield self._clients[peer], message
        else:
            log.error("dropped a message from a front end that has not said hello")

    def _welcome(self, peer: bytes, hello: Hello) -> None:
        if hello.contract != CONTRACT_VERSION:
            log.error(
                "front end %d speaks contract %d, not %d", hello.client, hello.contract, CONTRACT_VERSION
            )
            return
        before = self._peers.get(hello.client)
        if before is not None and before != peer:  # a restarted front end: the old one's requests go
            self._gone.append(hello.client)
            del self._clients[before]
        self._peers[hello.client], self._clients[peer] = peer, hello.client
        self._sock.send(peer, self._ready)

    def send(self, client: int, outputs: Outputs) -> None:
        """See `Mailbox`. A front end that is gone has its requests aborted at the next `receive`."""
        peer = self._peers.get(client)
        if peer is None:
            return
        try:
            self._sock.send(peer, encode(outputs))
        except PeerGone:
            self._forget(client)

    def _forget(self, client: int) -> None:
        peer = self._peers.pop(client, None)
        if peer is not None:
            log.warning("front end %d is gone; its requests are aborted", client)
            del self._clients[peer]
            self._gone.append(client)

    def clients(self) -> list[int]:
        return list(self._peers)
