"""uvicorn as the front end uses it: no signal handlers, no access log, no wake-ups when idle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from servelite.frontend.body import DIRECT_SEND, ASGIApp, Receive, Scope, Send
from servelite.frontend.errors import APIError

MAX_HEAD_BYTES: Final = 64 << 10  # request line and headers
HEAD_S: Final = 30.0  # from a head's first byte to its last
MAX_PIPELINED: Final = 16  # requests that wait behind the one that is answered
_CLOSE_S: Final = 0.5  # for requests to end, once their connections are gone
_HEAD_TOO_LARGE: Final = APIError(
    431, f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.", code="headers_too_large"
)


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


class _Connection(HttpToolsProtocol):
    """uvicorn's, with bounds on a request's head (its size, and the time it takes to come), and an eye on
    the client while requests are pipelined: uvicorn's stops reading then, and tells the last one only.
    """

    _head_bytes = 0  # received since the head began
    _parsed_bytes = 0  # of the head, as the parser has told
    _in_head = False
    _too_large = False
    _head_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # the others of the pipeline wait for it
    _data = b""  # what the parser is given

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Nothing need come at once, but a balancer's idle connections end some time.
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began_before, self._data = self._in_head, data
        super().data_received(data)
        self._data = b""
        if began_before and self._in_head:  # a single endless header never reaches `on_header`
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._too_large = True
                self.send_400_response("")

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes, self._parsed_bytes = True, 0, 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_S, self._expire)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _asks_for_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """No other protocol is spoken: a request for one is served as it is (RFC 9110, 7.8). The parser has
        stopped behind its head, and takes what follows for that protocol: a new one reads head and rest.
        """
        stopped = sys.exception()
        if stopped is None or not self._asks_for_upgrade() or self.transport.is_closing():
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b"close" if b"close" in value.lower() else b"keep-alive"
            if name != b"upgrade":
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join((*lines, b"", self._data[stopped.args[0] :])))

    def on_message_complete(self) -> None:
        if not self._asks_for_upgrade():
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        if self._asks_for_upgrade():
            return
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.close()
        elif self.pipeline:
            self.flow.resume_reading()  # or the end of the connection would not be seen

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _count(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEAD_BYTES:
            self._too_large = True
            raise ValueError("the head is too large")  # the parser's caller ends in `send_400_response`

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expire(self) -> None:
        """The head did not come in time."""
        if not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What cannot be read gets OpenAI's error body, and the connection ends; within an answer it only
        ends."""
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            self.transport.close()
            return
        error = _HEAD_TOO_LARGE if self._too_large else APIError(400, msg, code="invalid_http")
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        reason = HTTPStatus(error.status).phrase.encode()
        self.transport.write(b"HTTP/1.1 %d %s\r\n" % (error.status, reason) + head + body)
        self.transport.close()


class HTTPServer(uvicorn.Server):
    """Serves `app` on a listening socket until `stop`; the launcher's word decides, not signals."""

    def __init__(self, app: ASGIApp, timeout_keep_alive: int, tls: ssl.SSLContext | None = None) -> None:
        """`timeout_keep_alive`: seconds that a connection may be idle; `tls` None: plain HTTP."""

        async def directly(scope: Scope, receive: Receive, send: Send) -> None:
            scope[DIRECT_SEND] = send
            await app(scope, receive, send)

        config = uvicorn.Config(
            directly,
            loop="uvloop",
            http=_Connection,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=timeout_keep_alive,
        )
        config.load()
        config.ssl = tls
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
