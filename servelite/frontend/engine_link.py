"""A front end's socket to one life of the engine, read on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

from servelite.ipc.messages import FromEngine, ToEngine
from servelite.ipc.sockets import connect_engine, decode_from_engine, encode

_MESSAGES_AT_ONCE: Final = 64  # before the loop's other work has its turn


class EngineLink:
    """Lives on the loop that made it. `zmq.asyncio` would cost a future and a task switch a message."""

    def __init__(self, address: str, client: int, take: Callable[[FromEngine], None]) -> None:
        """
        Args:
            take: called with each message, and must not close the link; what it raises ends the reading.
        """
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._sock = connect_engine(address, client)
        self._loop.add_reader(self._sock.fileno(), self._read)

    @property
    def is_open(self) -> bool:
        """Whether it can be sent on."""
        return not self._sock.closed

    def send(self, message: ToEngine) -> None:
        """Queue a message, in order; never full: the socket has no high-water mark, admission bounds it."""
        self._sock.send(encode(message), zmq.NOBLOCK)
        self._loop.call_soon(self._read)

    async def read(self) -> None:
        """Until cancelled; raises what `take` raised, or msgspec.MsgspecError at what is no message."""
        try:
            await asyncio.shield(self._ended)
        finally:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        if not self._sock.closed:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    def _read(self) -> None:
        """Take what has come.

        ZeroMQ's descriptor tells of a change only, and a send may swallow it: so this runs after each
        send too, and reads until nothing is left.
        """
        if self._sock.closed or self._ended.done():
            return
        try:
            for _ in range(_MESSAGES_AT_ONCE):
                self._take(decode_from_engine(self._sock.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return
        except Exception as error:
            self._ended.set_exception(error)
            return
        self._loop.call_soon(self._read)
