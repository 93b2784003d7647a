"""The engine killed under sixteen answers of the real model: all finish, equal to an undisturbed run's.

`SERVELITE_TEST_ROUNDS` (2) says how often it is killed, each time at a random moment.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.streams import Told, all_streams, stream
from tests.http.server import running_server
from tests.ties import Draw, Pair, compare_tokens, model_scorer

COUNT, TOKENS = 16, 32
ROUNDS = int(os.environ.get("SERVELITE_TEST_ROUNDS", "2"))
FLAGS = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(512 << 20), "--no-enable-prefix-caching")


def body(number: int) -> dict[str, Any]:
    """Greedy and seeded, half with stop strings, half with logprobs."""
    return {
        "model": "demo",
        "prompt": f"Here is a story about the number {number}. " * (1 + number % 3),
        "temperature": 0.7 * (number % 2),
        "seed": number,
        "max_tokens": TOKENS,
        **({"stop": [".", "xyzzy"], "min_tokens": 12} if number % 4 >= 2 else {}),
        **({"logprobs": 2} if number % 8 >= 4 else {}),
    }


@pytest.fixture(scope="module")
def expected(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Told], list[list[int]]]:
    """What an undisturbed server says, and the prompts' token IDs."""
    with running_server(tmp_path_factory.mktemp("quiet"), *FLAGS) as server:
        bodies = [body(number) for number in range(COUNT)]

        async def ask() -> list[Told]:
            return await asyncio.gather(*(stream(server.port, each) for each in bodies))

        prompts = [
            server.post("/tokenize", {"model": "demo", "prompt": each["prompt"]})[1]["tokens"]
            for each in bodies
        ]
        return asyncio.run(ask()), prompts


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sixteen_answers_survive(
    tmp_path: Path, demo_model: Path, expected: tuple[list[Told], list[list[int]]]
) -> None:
    quiet, prompts = expected
    rng = random.Random(1)
    pauses, got = [], []

    async def one_round(port: int, engine: int) -> list[Told]:
        tasks = await all_streams(port, [body(number) for number in range(COUNT)])
        await asyncio.sleep(rng.random() * 1.5)
        began, alive = time.monotonic(), sum(not task.done() for task in tasks)
        os.kill(engine, signal.SIGKILL)
        told = await asyncio.gather(*tasks)
        pauses.append((alive, time.monotonic() - began))
        return told

    for _ in range(ROUNDS):  # a fresh server each: they are killed more often than a server puts up with
        with running_server(tmp_path, *FLAGS) as server:
            got.append(asyncio.run(one_round(server.port, server.child("engine core"))))
    print("answers alive at the kill, seconds to the last one's end:", pauses)

    pairs = [
        Pair(
            f"round {at}, request {number}",
            prompts[number],
            quiet[number].token_ids,
            told.token_ids,
            Draw(body(number)["temperature"], number),
        )
        for at, answers in enumerate(got)
        for number, told in enumerate(answers)
    ]
    compare_tokens(pairs, _scorer(demo_model))
    for answers in got:
        for mine, theirs in zip(answers, quiet, strict=True):
            assert mine.error is None and mine.done
            assert mine.token_ids != theirs.token_ids or mine.same(theirs, tolerance=1e-3), (mine, theirs)
    assert any(alive for alive, _ in pauses)


def _scorer(demo_model: Path) -> Any:
    from servelite.kernels.dispatch import REFERENCE
    from servelite.loader.model import load_model
    from servelite.tokenizer.model_files import open_model_files

    return model_scorer(load_model(open_model_files(demo_model), REFERENCE))
