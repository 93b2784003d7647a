"""Engine or rank killed or stopped under sixteen answers of the real model: all finish, equal to those of an
undisturbed run on one rank.

`SERVELITE_TEST_ROUNDS` (3; 10 before a release) says how often each is killed, each time at a random moment.
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
from tests.faults.test_front_ends import connections
from tests.http.server import Server, running_server
from tests.ties import Draw, Pair, compare_tokens, model_scorer

COUNT, TOKENS = 16, 32
ROUNDS = int(os.environ.get("SERVELITE_TEST_ROUNDS", "3"))
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


Expected = tuple[list[Told], list[list[int]]]
"""What an undisturbed server says, and the prompts' token IDs."""


@pytest.fixture(scope="module")
def expected(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    with running_server(tmp_path_factory.mktemp("quiet"), *FLAGS) as server:
        bodies = [body(number) for number in range(COUNT)]

        async def ask() -> list[Told]:
            return await asyncio.gather(*(stream(server.port, each) for each in bodies))

        prompts = [
            server.post("/tokenize", {"model": "demo", "prompt": each["prompt"]})[1]["tokens"]
            for each in bodies
        ]
        return asyncio.run(ask()), prompts


RANKS = ("--tp", "3")
DEATHS = 3  # of one server's engine: before each further restart it waits longer


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("flags", "victim", "number", "rounds"),
    [
        ((), "engine core", signal.SIGKILL, ROUNDS),
        (RANKS, "worker", signal.SIGKILL, ROUNDS),
        ((*RANKS, "--hang-timeout", "3"), "worker", signal.SIGSTOP, 1),
    ],
    ids=["engine killed", "rank killed", "rank hangs"],
)
def test_sixteen_answers_survive(
    tmp_path: Path,
    demo_model: Path,
    expected: Expected,
    flags: tuple[str, ...],
    victim: str,
    number: int,
    rounds: int,
) -> None:
    rng = random.Random(1)
    pauses, got = [], []

    async def one_round(server: Server) -> list[Told]:
        tasks = await all_streams(server.port, [body(number) for number in range(COUNT)])
        await asyncio.sleep(rng.random() * 1.5)
        began, alive = time.monotonic(), sum(not task.done() for task in tasks)
        os.kill(server.child(f"worker {rng.randrange(3)}" if victim == "worker" else victim), number)
        told = await asyncio.gather(*tasks)
        pauses.append((alive, time.monotonic() - began))
        return told

    for first in range(0, rounds, DEATHS):
        with running_server(tmp_path, *FLAGS, *flags) as server:
            for deaths in range(1, min(DEATHS, rounds - first) + 1):
                got.append(dict(enumerate(asyncio.run(one_round(server)))))
                wait_until_ready(server, deaths)
                assert server.idle_metrics(30)["servelite_engine_restarts_total"] == deaths
    print("answers alive at the fault, seconds to the last one's end:", pauses)
    _compare(expected, got, demo_model)
    assert any(alive for alive, _ in pauses)


def wait_until_ready(server: Server, deaths: int) -> None:
    deadline = time.monotonic() + 60
    while (
        server.metrics()["servelite_engine_restarts_total"] < deaths or server.get("/health/ready")[0] != 200
    ):
        assert time.monotonic() < deadline, server.errors()
        time.sleep(0.1)


def _compare(expected: Expected, got: list[dict[int, Told]], demo_model: Path) -> None:
    """Each round's answers, by request: token by token, but for ties; what comes of equal tokens is equal."""
    quiet, prompts = expected
    pairs = [
        Pair(
            f"round {at}, request {number}",
            prompts[number],
            quiet[number].token_ids,
            told.token_ids,
            Draw(body(number)["temperature"], number),
        )
        for at, answers in enumerate(got)
        for number, told in answers.items()
    ]
    print(compare_tokens(pairs, _scorer(demo_model)))
    for answers in got:
        for number, mine in answers.items():
            theirs = quiet[number]
            assert mine.error is None and mine.done
            assert mine.token_ids != theirs.token_ids or mine.same(theirs, tolerance=1e-3), (mine, theirs)


@pytest.mark.real_model
@pytest.mark.slow
def test_a_killed_front_end_costs_its_own_connections(
    tmp_path: Path, demo_model: Path, expected: Expected
) -> None:
    async def ask(server: Server) -> tuple[list[Told | BaseException], int]:
        tasks = await all_streams(server.port, [body(number) for number in range(COUNT)])
        own = {
            pid: connections(pid, server.port) for pid in map(server.child, ("front end 0", "front end 1"))
        }
        victim = min(own, key=own.__getitem__)  # so that there are others to see
        os.kill(victim, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True), own[victim]

    with running_server(tmp_path, *FLAGS, "--api-workers", "2") as server:
        engine = server.child("engine core")
        ends, cut = asyncio.run(ask(server))
        whole = {number: told for number, told in enumerate(ends) if isinstance(told, Told)}
        assert len(whole) == COUNT - cut >= COUNT / 2
        assert server.child("engine core") == engine
        server.idle_metrics(30)  # what was cut is aborted in the engine
    _compare(expected, [whole], demo_model)


def _scorer(demo_model: Path) -> Any:
    from servelite.kernels.dispatch import REFERENCE
    from servelite.loader.model import load_model
    from servelite.tokenizer.model_files import open_model_files

    return model_scorer(load_model(open_model_files(demo_model), REFERENCE))
