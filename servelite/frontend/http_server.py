"""uvicorn as the front end uses it: no signal handlers, no access log, no wake-ups when idle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any, Final

import uvicorn
from uvicorn.server import ServerState

_CLOSE_S: Final = 0.5  # for requests to end, once their connections are gone


class _ServerState(ServerState):
    """Makes the Date header when an answer asks for it, where uvicorn's own wakes each second to do so."""

    def __init__(self) -> None:
        self._second = -1
        self._headers: list[tuple[bytes, bytes]] = []
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """What every answer begins with."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._headers = [(b"date", formatdate(second, usegmt=True).encode())]
        return self._headers

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        pass  # uvicorn begins with none


class HTTPServer(uvicorn.Server):
    """Serves `app` on a listening socket until `stop`; the launcher's word decides, not signals."""

    def __init__(self, app: Any, timeout_keep_alive: int) -> None:
        """`timeout_keep_alive`: seconds that a connection may be idle."""
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=timeout_keep_alive,
        )
        super().__init__(config)
        self.server_state = _ServerState()
        self._stop = asyncio.Event()
        self._started = asyncio.Event()

    async def run_on(self, listener: socket.socket) -> None:
        """Serve until `stop`; connections that are open then are closed."""
        await self.serve(sockets=[listener])

    async def listening(self) -> None:
        """Until connections are accepted."""
        await self._started.wait()

    def stop(self) -> None:
        """End, without waiting for clients."""
        self.should_exit = self.force_exit = True
        self._stop.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close everything; what still waits for a client sees it leave, and ends without a word."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_CLOSE_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield

    async def main_loop(self) -> None:
        """Sleep until `stop`."""
        self._started.set()
        await self._stop.wait()
