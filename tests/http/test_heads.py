"""Connections: heads bounded in size and in time, before any key is asked for; pipelined requests."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from servelite.frontend import http_server
from servelite.frontend.http_server import MAX_HEAD_BYTES, HTTPServer


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says how many headers there were."""
    text = str(len(scope["headers"])).encode()
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@asynccontextmanager
async def served(keep_alive: int = 75, app: Any = app) -> AsyncIterator[int]:
    """The port of a server of `app`."""
    server = HTTPServer(app, keep_alive)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    task = asyncio.create_task(server.run_on(listener))
    await server.listening()
    try:
        yield port
    finally:
        server.stop()
        await task


async def answer(port: int, *parts: bytes, seconds: float = 10) -> bytes:
    """What comes back until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        return await asyncio.wait_for(reader.read(), seconds)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def many(count: int, size: int) -> bytes:
    return b"".join(b"x-%d: %s\r\n" % (i, b"v" * size) for i in range(count))


BEGIN, END = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n", b"\r\n"


async def test_a_head_within_the_limit_is_read() -> None:
    async with served() as port:
        for headers in (b"", many(1, MAX_HEAD_BYTES - 1000), many(500, 100)):
            assert (await answer(port, BEGIN, headers, END)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "head",
    [
        BEGIN + many(1, 2 * MAX_HEAD_BYTES) + END,  # one large header
        BEGIN + many(20_000, 10) + END,  # many small ones
        b"GET /" + b"p" * 2 * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n",  # a long path
        BEGIN + b"x: " + b"v" * 20 * MAX_HEAD_BYTES,  # a header that does not end
    ],
    ids=["large", "many", "path", "endless"],
)
async def test_a_head_beyond_it_is_refused(head: bytes) -> None:
    async with served() as port:
        pieces = [head[i : i + 16_384] for i in range(0, len(head), 16_384)]
        got = await answer(port, *pieces)
        # The refusal may be lost where the client still sends, never the end of the connection.
        assert not got or (got.startswith(b"HTTP/1.1 431 ") and b'"code":"headers_too_large"' in got)
        assert (await answer(port, BEGIN, END)).startswith(b"HTTP/1.1 200 ")


async def test_what_is_no_http_gets_an_error_body() -> None:
    async with served() as port:
        got = await answer(port, b"what is this\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_http"' in got


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Says a request's method, `connection` and body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    text = b"|".join((scope["method"].encode(), dict(scope["headers"]).get(b"connection", b""), body, b""))
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_an_upgrade_is_passed_over(protocol: bytes, size: int) -> None:
    """As a request of Java's client and of `curl --http2`; what looks like a request in its body is none."""
    inner = b"GET /inner HTTP/1.1\r\nhost: x\r\n\r\n"
    upgrade = b"host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\n" % protocol
    sent = b"POST / HTTP/1.1\r\n" + upgrade + b"content-length: %d\r\n\r\n" % len(inner) + inner
    sent += b"PUT / HTTP/1.1\r\n" + upgrade + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    sent += b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: x\r\n\r\n"
    async with served(app=echo) as port:
        got = await answer(port, *(sent[i : i + size] for i in range(0, len(sent), size)))
    assert got.count(b"HTTP/1.1 200 ") == 3
    for text in (b"POST|keep-alive|" + inner + b"|", b"PUT|keep-alive|abc|", b"GET|close||"):
        assert text in got


async def test_a_flood_of_upgrades_ends_its_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with served(app=echo) as port:
        one = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"
        assert await answer(port, one * 3000) == b""
        assert (await answer(port, BEGIN, END)).startswith(b"HTTP/1.1 200 ")
    assert "RecursionError" not in caplog.text


async def test_a_tunnel_is_no_request_of_ours() -> None:
    async with served(app=echo) as port:
        got = await answer(port, b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 400 ") and got.count(b"HTTP/1.1") == 1


async def test_what_is_no_http_behind_an_answer_is_not_told_within_it() -> None:
    going_on = asyncio.Event()

    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await going_on.wait()

    async with served(app=streaming) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"begun\r\n")
        writer.write(b"what is this\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        going_on.set()
        writer.close()


@pytest.mark.parametrize("begun", [b"", b"GET / HT", BEGIN])
async def test_a_head_that_does_not_come_ends_the_connection(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.5)
    async with served(keep_alive=1) as port:
        began = time.monotonic()
        assert await answer(port, begun) == b""
        assert time.monotonic() - began < 5


async def test_a_connection_that_is_used_again_keeps_its_time() -> None:
    async with served(keep_alive=1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            await asyncio.sleep(0.4)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await reader.readexactly(1)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_a_client_that_leaves_is_noticed_whatever_it_has_pipelined() -> None:
    gone, begun = asyncio.Event(), asyncio.Event()

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        begun.set()
        assert (await receive())["type"] == "http.disconnect"
        gone.set()

    async with served(app=waiting) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(2 * b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(begun.wait(), 5)
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.wait_for(gone.wait(), 5)
        del reader


async def test_pipelined_requests_are_answered_in_order_and_bounded() -> None:
    async with served() as port:
        one = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        got = await answer(port, one * 3 + BEGIN + END)
        assert got.count(b"HTTP/1.1 200 ") == 4
        held = asyncio.Event()

        async def waiting(scope: Any, receive: Any, send: Any) -> None:
            await held.wait()

        async with served(app=waiting) as other:
            assert await answer(other, one * (http_server.MAX_PIPELINED + 2)) == b""
            held.set()
