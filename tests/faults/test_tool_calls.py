"""The engine is killed under streams whose text is read or bound: calls, reasoning, a grammar, in each API.

All are in the middle of a call or of an object when it dies, at three places; each goes on where it was.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.streams import Told, stream
from tests.faults.test_engine_death import wait_until_ready
from tests.faults.test_matrix import ARGUMENTS, check_what_is_read, flags, only, read
from tests.http.server import Server, running_server

PLACES = (1, len(ARGUMENTS) // 3, len(ARGUMENTS) // 2)  # characters of the arguments, or of the object


def written(told: Told) -> int:
    """How much there is of the call or object that is the answer's last part; of two choices, the lesser."""
    last = ("arguments 0", "2 response.function_call_arguments.delta", "2 input_json_delta")
    found = [len(text) for part, text in told.parts.items() if part.endswith(last)]
    if not found and told.parts.get("0 content", "").startswith("{"):
        found = [len(told.parts["0 content"])]
    return min(found, default=0)


async def streamed(server: Server, kill_at: int = 0) -> list[tuple[Any, ...]]:
    """All of `read` at once; the engine is killed when the last of them has come so far."""
    reached, ended = [0] * len(read()), [False] * len(read())

    def seen(number: int, told: Told) -> None:
        before = min(reached)
        reached[number], ended[number] = written(told), told.finish_reason is not None
        if before < kill_at <= min(reached):
            assert not any(ended), "all were to be under way"
            os.kill(server.child("engine core"), signal.SIGKILL)

    tasks = [
        stream(server.port, body, lambda told, number=number: seen(number, told), path)
        for number, (path, body) in enumerate(read())
    ]
    async with asyncio.timeout(90):
        return [only(told) for told in await asyncio.gather(*tasks)]


@pytest.mark.slow
async def test_each_goes_on(tmp_path: Path, demo_model: Path) -> None:
    more = ("--max-num-seqs", "8", "--max-num-batched-tokens", "2048", "--num-gpu-blocks-override", "400")
    with running_server(tmp_path, *flags(tmp_path), *more, "--simulated-step-ms", "15") as server:
        expected = await streamed(server)
        check_what_is_read([parts for parts, *_ in expected])
        for number, place in enumerate(PLACES, 1):
            assert await streamed(server, place) == expected
            await wait_until_ready(server)
            assert server.metrics()["servelite_engine_restarts_total"] == number
