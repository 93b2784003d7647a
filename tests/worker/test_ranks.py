"""Runners as tensor-parallel ranks: what they agree on at the start, what they take of memory, lockstep."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from servelite.config import SettingError, Settings
from servelite.ipc.messages import KVGroup, RunnerFacts, SamplingParams
from servelite.kernels.collective import ONE_RANK, Collective
from servelite.worker import model_runner
from servelite.worker.kv_pool_size import PoolSize, size_pool
from servelite.worker.load import load_runner
from servelite.worker.simulated import SimulatedRunner
from tests.models.random_checkpoint import random_checkpoint
from tests.rank_threads import ThreadRank, run_ranks
from tests.worker.driver import Driver, Request

GIB, MIB = 1 << 30, 1 << 20
FACTS = RunnerFacts(64, 4, 64, 1000, (KVGroup("full", (0,), 32),), "none", "none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


def give_memory(monkeypatch: pytest.MonkeyPatch, *each: int) -> None:
    """Ranks find that much available, whichever asks first."""
    left: Iterator[int] = iter(each)
    monkeypatch.setattr(model_runner, "available_memory", lambda: next(left))


def facts(settings: Settings, folder: Path, ranks: int) -> RunnerFacts:
    """What every rank says, which must be the same."""
    first, *others = run_ranks(
        ranks, lambda group: replace(load_runner(settings, folder, group).facts, ledger=())
    )
    assert all(other == first for other in others)
    return first


def test_ranks_share_the_memory_and_agree_on_the_least(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 16 tokens has, on each of two ranks, one KV head of 8 in 3 layers: 3 KiB."""
    block = 2 * 3 * 16 * 8 * 4
    give_memory(monkeypatch, 40 * MIB + 12345, 2 * MIB)
    found = facts(Settings(), folder, 2)
    assert found.kv_groups == (KVGroup("full", (0, 1, 2), block),)
    assert found.num_blocks == int(0.4 * MIB) // block  # two fifths of a half of 2 MiB
    assert found.max_model_len == 512
    give_memory(monkeypatch, 40_000, 80_000)
    assert facts(Settings(), folder, 2).max_model_len == 2 * 16  # two blocks hold no more


def test_ranks_refuse_together_what_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_memory(monkeypatch, 40 * MIB, 2000)
    refused: list[str] = []

    def run(group: Collective) -> None:
        with pytest.raises(SettingError) as caught:
            load_runner(Settings(max_model_len=512), folder, group)
        refused.append(str(caught.value))

    run_ranks(2, run)
    assert len(refused) == 2 and len(set(refused)) == 1
    assert "a request of 512 tokens needs 32 KV blocks" in refused[0]


def test_a_share_of_the_memory_counts_the_weights_of_all_ranks() -> None:
    shape = {"model_len": 8192, "block_bytes": MIB}
    half, two = Settings(gpu_memory_utilization=0.5), ThreadRank(0, 2)
    # Of 10 GiB, 2 in weights: half of a half for each rank, less its own 1 GiB.
    assert size_pool(half, available=8 * GIB, weights=GIB, group=two, **shape) == PoolSize(1536, 8192)
    assert size_pool(Settings(), available=5 * GIB, group=two, **shape) == PoolSize(1024, 8192)
    assert size_pool(Settings(), available=500 * GIB, group=two, **shape) == PoolSize(2048, 8192)
    by_bytes = Settings(kv_cache_memory_bytes=600 * MIB)  # a rank's
    assert size_pool(by_bytes, available=5 * GIB, group=two, **shape) == PoolSize(600, 8192)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_speaks_for_all(ranks: int, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "servelite.worker"):
        facts(Settings(num_gpu_blocks_override=20), folder, ranks)
    lowered, model = [record.message for record in caplog.records]
    assert lowered.startswith("max_model_len lowered from 512 to 320")
    assert model.startswith("model: LlamaForCausalLM in float32, 20 KV blocks of 16 tokens")
    assert model.endswith(" in each of 2 ranks") == (ranks == 2)


def simulated_tokens(group: Collective) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=12, temperature=0.8)
    driver = Driver(SimulatedRunner(FACTS, 4, verify=True, group=group))
    return driver.run([Request([1, 2, 3], sampling, seed=4), Request([5] * 20, sampling)], chunk=8)


def test_simulated_ranks_answer_as_one_does() -> None:
    assert run_ranks(3, simulated_tokens) == [simulated_tokens(ONE_RANK)] * 3


def test_simulated_ranks_wait_for_each_other_once_a_step() -> None:
    came: list[int] = []

    class Counting(ThreadRank):
        def barrier(self) -> None:
            came.append(self.rank)

    tokens = simulated_tokens(Counting(1, 2))
    assert tokens == simulated_tokens(ONE_RANK) and came == [1] * (12 + 2)  # three steps of the longer prompt


MEMORY = """
import re, sys
from pathlib import Path
import torch
from servelite.kernels.dispatch import REFERENCE
from servelite.loader.model import load_model
from servelite.loader.resolve import resolve_model
from servelite.tokenizer.model_files import open_model_files
from tests.rank_threads import ThreadRank

def grown(since=0):
    return (int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10) - since

files = open_model_files(resolve_model(sys.argv[1]))
before = grown()
model = load_model(files, REFERENCE, getattr(torch, sys.argv[2]), ThreadRank(1, 3))
print(grown(before), sum(slot.tensor.nbytes for slot in model.weights()))
"""


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_a_rank_of_three_takes_a_third_of_the_memory(
    format: str, dtype: str, demo_model: Path, tmp_path: Path
) -> None:
    path, parameters = demo_model, 134_515_008
    if format == "safetensors":
        sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 16}
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
        path = random_checkpoint(tmp_path, "LlamaForCausalLM", vocab_size=49152, **sizes, **heads)
        parameters = (path / "model.safetensors").stat().st_size // 4
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, path, dtype], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, weights = map(int, done.stdout.split())
    third = parameters * getattr(torch, dtype).itemsize / 3
    assert third < weights < 1.01 * third
    # The rest is code and caches, ten megabytes or so whatever the size of the model.
    assert 0.9 * third < grown < weights + 30e6
    print(f"{format}, {dtype}: {grown / 1e6:.0f} MB for {weights / 1e6:.0f} MB of weights")
