"""Models of several KV groups, or of experts, behind the real engine: tokens do not depend on batch, chunk
or blocks.

Half of the requests are greedy, half seeded; of each, half with penalties and token masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from servelite.config import Settings
from servelite.kernels.dispatch import REFERENCE
from servelite.loader.model import load_model
from servelite.tokenizer.model_files import open_model_files
from servelite.worker.load import load_runner
from servelite.worker.model_runner import CPUModelRunner
from tests.engine_harness import Harness
from tests.ties import Draw, Pair, compare_tokens, model_scorer
from tests.tiny_models import tiny_gemma3, tiny_llama, tiny_model, tiny_moe, tiny_windowed_qwen2

WINDOW, COUNT, TOKENS = 20, 8, 24


FULL, SLIDING = "full_attention", "sliding_attention"
UNEQUAL = [SLIDING, SLIDING, SLIDING, FULL, *[SLIDING] * 4, FULL, *[SLIDING] * 4, FULL]

MODELS: dict[str, tuple[Callable[[Path], Any], int]] = {
    "windows": (lambda f: tiny_windowed_qwen2(f, window=WINDOW), 50),
    "unequal groups": (
        lambda f: tiny_gemma3(f, window=WINDOW, num_hidden_layers=14, layer_types=UNEQUAL), 80,
    ),
    "no full layer": (lambda f: tiny_model(f, "Mistral", sliding_window=WINDOW), 20),
    "experts": (tiny_moe, 40),
}  # fmt: skip
"""How each is made, and so few blocks that requests are preempted."""


class Model(NamedTuple):
    folder: Path
    few_blocks: int


pytestmark = pytest.mark.usefixtures("one_thread")  # these products are too small for two


SLOW = ("windows", "no full layer")  # the other two show most of what these do


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    make, few_blocks = MODELS[request.param]
    folder = tmp_path_factory.mktemp("tiny")
    make(folder)
    return Model(folder, few_blocks)


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


def run(folder: Path, *, together: bool, **values: Any) -> tuple[list[list[int]], int]:
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


def test_tokens_are_the_same_alone_batched_chunked_and_preempted(model: Model) -> None:
    alone, _ = run(model.folder, together=False)
    assert [len(tokens) for tokens in alone] == [TOKENS] * COUNT
    pairs = []
    few = {"num_gpu_blocks_override": model.few_blocks, "max_num_batched_tokens": 16}
    for name, values in {
        "batch": {},
        "chunks, depth 2": {"max_num_batched_tokens": 16, "async_depth": 2},
        "few blocks": few,
        "few blocks, depth 2": few | {"async_depth": 2},
    }.items():
        together, preemptions = run(model.folder, together=True, **values)
        assert (preemptions > 0) == name.startswith("few blocks"), name
        pairs += [Pair(f"{name}, {i}", prompt(i), alone[i], together[i], draw(i)) for i in range(COUNT)]
    scorer = model_scorer(load_model(open_model_files(model.folder), REFERENCE))
    print(compare_tokens(pairs, scorer))


def test_the_facts_name_the_window_groups(tmp_path: Path) -> None:
    tiny_gemma3(tmp_path, window=WINDOW, num_hidden_layers=14, layer_types=UNEQUAL)
    settings = Settings(block_size=8, num_gpu_blocks_override=200, max_model_len=64)
    full, *windows = load_runner(settings, tmp_path).facts.kv_groups
    assert (full.kind, full.layers, full.window) == ("full", (3, 8, 13), 0)
    assert [(group.kind, group.layers, group.window) for group in windows] == [
        ("window", layers, WINDOW) for layers in ((0, 1, 2), (4, 5, 6), (7, 9, 10), (11, 12))
    ]
    # Three layers, keys and values, 8 tokens, two heads of 16, float32: of the last group too.
    assert {group.block_bytes for group in (full, *windows)} == {3 * 2 * 8 * 2 * 16 * 4}


def test_bfloat16_halves_the_blocks_and_the_weights(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    settings = Settings(block_size=8, num_gpu_blocks_override=200, max_model_len=64)
    wide, narrow = (load_runner(replace(settings, dtype=dtype), tmp_path) for dtype in ("auto", "bfloat16"))
    assert (wide.facts.dtype, narrow.facts.dtype) == ("float32", "bfloat16")
    assert wide.facts.kv_groups[0].block_bytes == 2 * narrow.facts.kv_groups[0].block_bytes
    assert isinstance(narrow, CPUModelRunner)
    large = [slot for slot in narrow._model.weights() if slot.tensor.dim() > 1]
    assert {slot.tensor.dtype for slot in large} == {torch.bfloat16}
    assert {cache.keys.dtype for cache in narrow._pool.layers} == {torch.bfloat16}


def test_in_bfloat16_each_greedy_token_is_the_models_best_but_for_rounding(tmp_path: Path) -> None:
    """In a batch and chunks, against the whole sequence at once: sums of another order may round to the
    neighbour of a value, which moves these logits by some percent of their spread of 2."""
    tiny_llama(tmp_path)
    scorer = model_scorer(load_model(open_model_files(tmp_path), REFERENCE, torch.bfloat16))
    answers, _ = run(tmp_path, together=True, dtype="bfloat16", max_num_batched_tokens=16)
    plain = [i for i in range(COUNT) if draw(i).temperature == 0 and not rules(i)]
    assert plain
    for i in plain:
        for at, token in enumerate(answers[i]):
            logits = scorer([*prompt(i), *answers[i][:at]])
            assert logits[token] > logits.max() - 0.3, (i, at)
