"""Overload is told at once."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from tests.conformance.sse import read_events
from tests.conformance.target import COMPLETIONS, GREEDY, Target
from tests.http.client import Connection, Reply, connected

LONG = {"prompt": "a", "max_tokens": 300, "ignore_eos": True} | GREEDY


async def test_hlt_01_a_bounded_queue_answers_overflow_at_once(narrow: Target) -> None:
    """HLT-01: two rows, four places in the queue, twenty at once."""
    assert narrow.own is not None
    port, begun = narrow.own.port, 0.0
    body = {"model": narrow.model} | LONG | {"max_tokens": 120}
    refusals = narrow.metric("requests_refused_total")

    async def one(number: int, connection: Connection) -> tuple[Reply, float]:
        reply = await connection.post(COMPLETIONS, body | {"stream": number % 2 == 1})
        return reply, time.monotonic() - begun

    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connected(port)) for _ in range(20)]
        begun = time.monotonic()
        tasks = [asyncio.create_task(one(*each)) for each in enumerate(connections)]
        slowest = await _slowest_health(port, tasks)
        replies = [await task for task in tasks]
    served = [reply for reply, _ in replies if reply.status == 200]
    refused = [(reply, seconds) for reply, seconds in replies if reply.status != 200]
    assert len(served) == 6 and slowest < 1
    for reply, seconds in refused:
        assert reply.status in (429, 503) and seconds < 1
        assert reply.headers["content-type"] == "application/json" and reply.json()["error"]["message"]
        assert int(reply.headers["retry-after"]) >= 1
    for reply in served:
        if reply.headers["content-type"].startswith("text/event-stream"):
            assert read_events(reply.body).done
        else:
            assert reply.json()["usage"]["completion_tokens"] == 120
    assert narrow.metric("requests_refused_total") - refusals == len(refused) == 14
    narrow.check_alive()


async def _slowest_health(port: int, tasks: list[asyncio.Task[tuple[Reply, float]]]) -> float:
    """Asks after the server's health until all tasks are done; the longest that took, in seconds."""
    slowest = 0.0
    while not all(task.done() for task in tasks):
        begun = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        slowest = max(slowest, time.monotonic() - begun)
        await asyncio.sleep(0.05)
    return slowest
