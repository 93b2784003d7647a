"""uvicorn as the front end uses it: no signal handlers, no access log, few wake-ups when idle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

KEEP_ALIVE_S: Final = 75  # above the idle time-out of the usual balancers (60 s)
_DATE_S: Final = 1.0  # how often the Date header's second is looked at


class HTTPServer(uvicorn.Server):
    """Serves `app` on a listening socket until `stop`; the launcher's word decides, not signals."""

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        super().__init__(config)
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield

    async def main_loop(self) -> None:
        """Sleep until `stop`, with a look at the clock each second."""
        self._started.set()
        while not self._stop.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _DATE_S)
