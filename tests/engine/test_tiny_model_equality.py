"""A tiny random model gives a request the same tokens whatever happens around it.

Alone, in a batch of 16, in chunks of 16 tokens, after prefix hits at every offset around a block
border, with so few blocks that requests are preempted, at depth 1, 2 and 3; with full attention in
all layers, with a window in every second one, in all but one of seven, and with experts. Float32, the
tie rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servelite.config import Settings
from servelite.worker.model_runner import CPUModelRunner
from tests.engine_harness import Harness, prompt
from tests.ties import Draw, Pair, compare_tokens, model_scorer
from tests.tiny_models import tiny_gemma3, tiny_llama, tiny_moe, tiny_windowed_qwen2

BLOCK, COUNT, VOCAB = 8, 16, 257


def small_prompt(length: int, salt: int) -> list[int]:
    return [token % VOCAB for token in prompt(length, salt)]


def requests() -> list[dict[str, Any]]:
    """Eight pairs that begin alike for 17 to 47 tokens; half of all greedy, half seeded."""
    found = []
    for i in range(COUNT):
        pair = i // 2
        shared = small_prompt(17 + pair * 4 + pair % 3, salt=pair)
        found.append(
            {
                "prompt": [*shared, *small_prompt(3 + i, salt=100 + i)],
                "max_tokens": 24,
                "temperature": 0.0 if i % 4 < 2 else 0.7 + i / 20,
                "top_k": 0 if i % 3 else 40,
                "seed": 7 + i,
            }
        )
    return found


MODELS: dict[str, Callable[[Path], Any]] = {
    "full": tiny_llama,
    "windows": lambda folder: tiny_windowed_qwen2(folder, window=19),
    "unequal groups": lambda folder: tiny_gemma3(folder, window=19),
    "experts": tiny_moe,
}
SLOW = ("unequal groups", "experts")


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS],
)
def runner(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> CPUModelRunner:
    folder: Path = tmp_path_factory.mktemp("tiny")
    MODELS[request.param](folder)
    return CPUModelRunner.load(settings(), folder)


def settings(**values: Any) -> Settings:
    defaults: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": COUNT,
        "block_size": BLOCK,
        "num_gpu_blocks_override": COUNT * 16,
        "debug": True,
    }
    return Settings(**(defaults | values))


def harness_over(runner: CPUModelRunner, **values: Any) -> Harness:
    chosen = settings(**values)
    groups = len(runner.facts.kv_groups)
    per_group = chosen.num_gpu_blocks_override // (
        1 if groups <= 2 else 2
    )  # most have a window: they hold less
    facts = replace(runner.facts, num_blocks=per_group * groups)
    return Harness(chosen, CPUModelRunner(runner._model, facts, COUNT))


def run(harness: Harness, asked: list[dict[str, Any]], *, alone: bool = False) -> list[list[int]]:
    numbers = []
    for request in asked:
        numbers.append(harness.add(**request))
        if alone:
            harness.drain()
    harness.drain()
    harness.assert_empty()
    harness.close()
    return [harness.answers[number].tokens for number in numbers]


def compare(
    runner: CPUModelRunner, asked: list[dict], expected: list[list[int]], got: list[list[int]]
) -> None:
    pairs = [
        Pair(f"request {i}", request["prompt"], a, b, Draw(request["temperature"], request["seed"]))
        for i, (request, a, b) in enumerate(zip(asked, expected, got, strict=True))
    ]
    print(compare_tokens(pairs, model_scorer(runner._model)))


@pytest.fixture(scope="module")
def expected(runner: CPUModelRunner) -> list[list[int]]:
    tokens = run(harness_over(runner, enable_prefix_caching=False), requests(), alone=True)
    assert all(len(answer) == 24 for answer in tokens)
    return tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 40},
        {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
    ],
    ids=["batch of 16", "chunks of 16", "few blocks", "few blocks, chunks, no cache"],
)
def test_batch_chunks_depth_and_preemption(
    runner: CPUModelRunner, expected: list[list[int]], values: dict[str, Any], depth: int
) -> None:
    harness = harness_over(runner, async_depth=depth, **values)
    got = run(harness, requests())
    compare(runner, requests(), expected, got)
    assert (harness.mailbox.load.preemptions > 0) == ("num_gpu_blocks_override" in values)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefix_hits_at_every_offset_around_a_border(runner: CPUModelRunner, depth: int) -> None:
    base = small_prompt(64, salt=1)
    asked = [
        {"prompt": base[:length], "max_tokens": 12, "temperature": 0.0 if length % 2 else 0.9, "seed": length}
        for length in range(2 * BLOCK - 2, 4 * BLOCK + 3)
    ]
    cold = run(harness_over(runner, enable_prefix_caching=False), asked, alone=True)
    harness = harness_over(runner, async_depth=depth)
    warm = run(harness, [{"prompt": base, "max_tokens": 1, "temperature": 0.0}, *asked], alone=True)[1:]
    compare(runner, asked, cold, warm)
    assert harness.scheduler.requests.totals.prefix_hits >= sum(
        (len(r["prompt"]) - 1) // BLOCK * BLOCK for r in asked
    )
