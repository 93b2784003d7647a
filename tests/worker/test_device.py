"""Recording and replaying: what is padded up to a bucket changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from servelite.config import Settings
from servelite.ipc.messages import RunnerFacts, SamplingParams
from servelite.kernels.attention_batch import AttentionBatch, build_attention_batch
from servelite.kernels.dispatch import REFERENCE
from servelite.kernels.kv_layout import KVGroupSpec, KVPool
from servelite.loader.model import load_model
from servelite.models.base import CausalModel
from servelite.tokenizer.model_files import open_model_files
from servelite.worker.device import CPUDevice, StepBuffers
from servelite.worker.load import load_runner
from servelite.worker.model_runner import CPUModelRunner
from tests.ties import Draw, Pair, compare_tokens, model_scorer
from tests.tiny_models import tiny_windowed_qwen2
from tests.worker.driver import Driver, Request


@pytest.mark.parametrize(
    ("ladder", "buckets"),
    [((), [1, 3, 4, 5, 17, 2]), ((16, 1, 4), [1, 4, 4, 16, 17, 4]), ((8,), [8, 8, 8, 8, 17, 8])],
)
def test_a_step_runs_in_the_smallest_bucket_that_holds_it(ladder: Sequence[int], buckets: list[int]) -> None:
    seen = []

    def compute(buffers: StepBuffers, batches: tuple[AttentionBatch, ...]) -> torch.Tensor:
        seen.append((buffers.token_ids.tolist(), buffers.positions.tolist()))
        return torch.stack((buffers.token_ids, buffers.positions), dim=1)

    replay = CPUDevice(ladder).record(compute)
    for tokens, bucket in zip([1, 3, 4, 5, 17, 2], buckets, strict=True):
        ids, positions = torch.arange(tokens) + 50, torch.arange(tokens) + 7
        out = replay(ids, positions, ())
        assert torch.equal(out, torch.stack((ids, positions), dim=1))
        padding = [0] * (bucket - tokens)
        assert seen[-1] == (ids.tolist() + padding, positions.tolist() + padding)


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 5, 1], [4, 6]])
def test_padding_writes_no_keys_and_gives_zeros(counts: list[int]) -> None:
    pool = KVPool((KVGroupSpec("full", (0,), 2, 8),), 6, 4)
    pool.zero(torch.arange(6))
    cache = pool.layers[0]
    starts, tables = np.cumsum([0, *counts]), np.arange(6, dtype=np.int32).reshape(-1, 2)
    batch = build_attention_batch(starts, np.zeros(len(counts), np.int64), tables[: len(counts)], 4)
    tokens, bucket = int(starts[-1]), int(starts[-1]) + 5
    torch.manual_seed(0)
    query, keys, values = torch.randn(bucket, 4, 8), torch.randn(bucket, 2, 8), torch.randn(bucket, 2, 8)
    REFERENCE.write_kv(keys, values, cache, batch)
    assert int(cache.keys.any(dim=-1).any(dim=-1).sum()) == tokens
    out = REFERENCE.paged_attention(query, cache, batch, 1.0)
    assert torch.equal(out[:tokens], REFERENCE.paged_attention(query[:tokens], cache, batch, 1.0))
    assert not out[tokens:].any()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalModel, RunnerFacts]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    tiny_windowed_qwen2(folder, window=20)
    facts = load_runner(Settings(block_size=8, num_gpu_blocks_override=300), folder).facts
    return load_model(open_model_files(folder), REFERENCE), facts


def requests() -> list[Request]:
    random = np.random.default_rng(0)
    kinds = [SamplingParams(max_tokens=16, temperature=t, logprobs=1, prompt_logprobs=1) for t in (0.0, 1.0)]
    return [Request(random.integers(0, 257, 3 + 11 * i).tolist(), kinds[i % 2], seed=i) for i in range(6)]


@pytest.mark.parametrize("chunk", [16, 1 << 30])
def test_forced_buckets_do_not_change_a_token(chunk: int, tiny: tuple[CausalModel, RunnerFacts]) -> None:
    model, facts = tiny
    plain, padded = requests(), requests()
    Driver(CPUModelRunner(model, facts, 8)).run(plain, chunk)
    runner = CPUModelRunner(model, replace(facts), 8, CPUDevice(ladder=(8, 64, 512)))
    sentinel = 0  # nobody's block
    for layer in runner._pool.layers:
        layer.keys[sentinel], layer.values[sentinel] = 3.25, 3.25
    Driver(runner, first_free=1).run(padded, chunk)
    for layer in runner._pool.layers:
        assert (layer.keys[sentinel] == 3.25).all()
        assert (layer.values[sentinel] == 3.25).all()
    pairs = [
        Pair(str(i), a.prompt, a.output, b.output, Draw(a.sampling.temperature, a.seed))
        for i, (a, b) in enumerate(zip(plain, padded, strict=True))
    ]
    compare_tokens(pairs, model_scorer(model))
    for a, b in zip(plain, padded, strict=True):
        for part, other in zip(a.prompt_logprobs, b.prompt_logprobs, strict=True):
            np.testing.assert_allclose(
                np.frombuffer(part.chosen, "<f4"), np.frombuffer(other.chosen, "<f4"), atol=1e-4
            )
