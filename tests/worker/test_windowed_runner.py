"""A model with windowed layers behind the real engine: tokens do not depend on batch, chunk or blocks.

Half of the requests are greedy, half seeded; of each, half with penalties and token masks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servelite.config import Settings
from servelite.kernels.dispatch import REFERENCE
from servelite.loader.model import load_model
from servelite.tokenizer.model_files import open_model_files
from servelite.worker.load import load_runner
from tests.engine_harness import Harness
from tests.ties import Draw, Pair, compare_tokens, model_scorer
from tests.tiny_models import tiny_windowed_llama

WINDOW, COUNT, TOKENS = 20, 8, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("windowed")
    tiny_windowed_llama(made, window=WINDOW)
    return made


def prompt(i: int) -> list[int]:
    return np.random.default_rng(i).integers(0, 257, 5 + 19 * i).tolist()


def draw(i: int) -> Draw:
    return Draw(0.0 if i % 2 else 0.9, seed=100 + i)


def rules(i: int) -> dict[str, Any]:
    """Penalties and masks, whose counts a preempted request must find again."""
    if i % 4 < 2:
        return {}
    return {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": ((3, 4.0), (7, -2.0)),
        "bad_words": ((9,), (3, 3)),
        "min_tokens": TOKENS,
        "stop_token_ids": (3, 40),
    }


def run(folder: Path, *, together: bool, **values: int) -> tuple[list[list[int]], int]:
    """Each request's tokens, and how many preemptions there were."""
    settings = Settings(
        **({"max_num_seqs": COUNT, "max_model_len": 256, "block_size": 8, "debug": True} | values)
    )
    harness = Harness(settings, load_runner(settings, folder))
    numbers = []
    for i in range(COUNT):
        temperature, seed, _ = draw(i)
        numbers.append(harness.add(prompt(i), TOKENS, temperature=temperature, seed=seed, **rules(i)))
        if not together:
            harness.drain()
    harness.drain()
    harness.assert_empty()
    harness.close()
    return [harness.answers[number].tokens for number in numbers], harness.mailbox.load.preemptions


def test_tokens_are_the_same_alone_batched_chunked_and_preempted(folder: Path) -> None:
    alone, _ = run(folder, together=False)
    assert [len(tokens) for tokens in alone] == [TOKENS] * COUNT
    pairs = []
    for name, values in {
        "batch": {},
        "chunks, depth 2": {"max_num_batched_tokens": 16, "async_depth": 2},
        "depth 3": {"async_depth": 3},
        "few blocks": {"num_gpu_blocks_override": 50, "max_num_batched_tokens": 16},
        "few blocks, depth 2": {
            "num_gpu_blocks_override": 50,
            "max_num_batched_tokens": 16,
            "async_depth": 2,
        },
    }.items():
        together, preemptions = run(folder, together=True, **values)
        assert (preemptions > 0) == name.startswith("few blocks")
        pairs += [Pair(f"{name}, {i}", prompt(i), alone[i], together[i], draw(i)) for i in range(COUNT)]
    model = load_model(open_model_files(folder), REFERENCE)
    print(compare_tokens(pairs, model_scorer(model)))


def test_the_facts_name_the_window_group(folder: Path) -> None:
    runner = load_runner(Settings(block_size=8, num_gpu_blocks_override=100), folder)
    full, window = runner.facts.kv_groups
    assert (full.kind, full.layers, full.window) == ("full", (0, 2), 0)
    assert (window.kind, window.layers, window.window) == ("window", (1, 3), WINDOW)
    assert full.block_bytes == window.block_bytes == 2 * 2 * 8 * 2 * 8 * 4
