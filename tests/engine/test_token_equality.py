"""The same requests give the same tokens alone, in a batch of 16, in chunks of 16 tokens, at depth 1 and 2.

On the real model in float32, half of the requests greedy and half seeded; ties as CONTRIBUTING.md says.
`test_tiny_model_equality.py` has chunks at depth 2, and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servelite.config import Settings
from tests.engine_harness import Harness
from tests.ties import Draw, Pair, compare_tokens, model_scorer

COUNT, TOKENS = 16, 16
SUBJECTS = ["rain", "a lighthouse", "prime numbers", "bread", "the moon", "a lost dog", "rivers", "chess"]


def requests(tokenizer: Any) -> list[dict[str, Any]]:
    """Prompts from 10 to some 100 tokens; the odd ones seeded, each at another temperature."""
    found = []
    for i in range(COUNT):
        text = f"Write about {SUBJECTS[i % 8]}. " + "Keep in mind what was said before. " * (i % 5) * 3
        greedy = i % 2 == 0
        found.append(
            {
                "prompt": tokenizer.encode(text, add_special_tokens=False),
                "max_tokens": TOKENS,
                "temperature": 0.0 if greedy else 0.5 + i / 20,
                "top_p": 1.0 if i % 3 else 0.9,
                "seed": 1000 + i,
            }
        )
    return found


@pytest.fixture(scope="module")
def loaded(demo_model: Path) -> Iterator[tuple[Any, Any, Any]]:
    from servelite.tokenizer.model_files import open_model_files
    from servelite.tokenizer.tokenizer import load_tokenizer
    from servelite.worker.model_runner import CPUModelRunner

    settings = Settings(model=str(demo_model), max_model_len=512, num_gpu_blocks_override=512)
    runner = CPUModelRunner.load(settings, demo_model)
    yield runner._model, runner.facts, load_tokenizer(open_model_files(demo_model))


def run(loaded: tuple[Any, Any, Any], batch: bool, **values: Any) -> list[list[int]]:
    """Each request's tokens, all at once or one after the other."""
    from servelite.worker.model_runner import CPUModelRunner

    model, facts, tokenizer = loaded
    settings = Settings(**({"max_num_seqs": COUNT, "max_model_len": 512, "debug": True} | values))
    harness = Harness(settings, CPUModelRunner(model, replace(facts), COUNT))
    numbers = []
    for request in requests(tokenizer):
        numbers.append(harness.add(**request))
        if not batch:
            harness.drain()
    harness.drain()
    harness.assert_empty()
    harness.close()
    return [harness.answers[number].tokens for number in numbers]


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_batch_chunks_and_depth_do_not_change_a_token(loaded: tuple[Any, Any, Any]) -> None:
    model, _, tokenizer = loaded
    expected = run(loaded, batch=False)
    assert all(len(tokens) == TOKENS for tokens in expected)
    comparisons = []
    for name, values in {
        "depth 2": {"async_depth": 2},
        "chunks of 16": {"max_num_batched_tokens": 16},
    }.items():
        got = run(loaded, batch=True, **values)
        for i, request in enumerate(requests(tokenizer)):
            comparisons.append(
                Pair(
                    f"{name}, request {i}",
                    request["prompt"],
                    expected[i],
                    got[i],
                    Draw(request["temperature"], request["seed"]),
                )
            )
    print(compare_tokens(comparisons, model_scorer(model)))
