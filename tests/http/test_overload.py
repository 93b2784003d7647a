"""Two hundred clients at once on eight rows: all are served, or those beyond the bound told at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.http.client import Connection, Reply, connected
from tests.http.server import running_server

CLIENTS = 200
SIMULATED = ("--executor", "simulated", "--max-num-seqs", "8")


def body(number: int, tokens: int) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": f"request {number}: " + "word " * (number % 40),
        "seed": number,
        "max_tokens": tokens,
        "ignore_eos": True,
    }


async def all_at_once(port: int, tokens: int) -> list[asyncio.Task[tuple[Reply, float]]]:
    """200 requests, each on a connection of its own that was open before the first was sent."""
    connections = await asyncio.gather(*(_open(port) for _ in range(CLIENTS)))
    begun = time.monotonic()

    async def one(number: int, stack: AsyncExitStack, connection: Connection) -> tuple[Reply, float]:
        async with stack:
            reply = await connection.post("/v1/completions", body(number, tokens))
            return reply, time.monotonic() - begun

    return [asyncio.create_task(one(number, *opened)) for number, opened in enumerate(connections)]


async def _open(port: int) -> tuple[AsyncExitStack, Connection]:
    stack = AsyncExitStack()
    return stack, await stack.enter_async_context(connected(port))


async def test_all_answers_are_those_of_a_quiet_server(tmp_path: Path, demo_model: Path) -> None:
    flags = (*SIMULATED, "--simulated-step-ms", "1", "--max-waiting-requests", "200")
    with running_server(tmp_path, *flags) as server:
        together = [reply for reply, _ in await asyncio.gather(*await all_at_once(server.port, 8))]
        assert Counter(reply.status for reply in together) == {200: CLIENTS}
        async with connected(server.port) as connection:
            for number, reply in enumerate(together):
                alone = await connection.post("/v1/completions", body(number, 8))
                assert alone.json()["choices"] == reply.json()["choices"], number
        server.idle_metrics()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_those_beyond_the_bound_are_told_when_to_come_back(tmp_path: Path, demo_model: Path) -> None:
    flags = (*SIMULATED, "--simulated-step-ms", "75", "--max-waiting-requests", "20")
    with running_server(tmp_path, *flags) as server:
        tasks = await all_at_once(server.port, 100)  # an answer takes 7.5 s, once it has a row
        refused = [await told for told in islice(asyncio.as_completed(tasks), 172)]
        waiting = [task for task in tasks if not task.done()]
        assert len(waiting) == 28
        for reply, seconds in refused:
            assert reply.status == 503 and reply.json()["error"]["code"] == "queue_full"
            assert seconds < 5  # under 1 where nothing else runs
            assert 1 <= int(reply.headers["retry-after"]) <= 90
        async with connected(server.port) as connection:
            tries, reply = 1, refused[0][0]
            while reply.status == 503:
                await asyncio.sleep(int(reply.headers["retry-after"]))
                reply = await connection.post("/v1/completions", body(0, 100))
                tries += 1
            assert reply.status == 200 and reply.json()["usage"]["completion_tokens"] == 100
            assert tries > 2
        assert {reply.status for reply, _ in await asyncio.gather(*waiting)} == {200}
        server.idle_metrics()
