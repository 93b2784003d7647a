"""Vectors of real, tiny models, through the engine: transformers' hidden states, pooled by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from servelite.config import SettingError, Settings
from servelite.ipc.messages import Kind, NewRow, Plan, Pooling, SamplingParams, pack
from servelite.kernels.collective import Collective
from servelite.worker.load import load_runner
from servelite.worker.model_runner import CPUModelRunner
from servelite.worker.pooler import Pooler
from servelite.worker.step_inputs import PooledSpan
from tests.engine_harness import Harness
from tests.models.test_bert import tiny_bert
from tests.rank_threads import run_ranks
from tests.tiny_models import tiny_gemma3, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")  # these products are too small for two

SMALL: dict[str, Any] = {"max_num_seqs": 8, "block_size": 8, "debug": True}
LENGTHS = (50, 1, 17, 33, 64, 24)
PROMPTS = [np.random.default_rng(n).integers(0, 257, n).tolist() for n in LENGTHS]
KINDS = ("mean", "last", "cls")


class Made(NamedTuple):
    folder: Path
    hidden: list[torch.Tensor]  # of each prompt, by transformers


def hidden_states(model: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]


@pytest.fixture(scope="module", params=["llama", "gemma3", "bert"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "bert":
        return Made(folder, hidden_states(tiny_bert(folder)))
    theirs = tiny_llama(folder) if request.param == "llama" else tiny_gemma3(folder, window=19)
    return Made(folder, hidden_states(theirs.model))


def pooled(hidden: torch.Tensor, kind: str) -> torch.Tensor:
    return {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[kind]


def vectors(folder: Path, *, generating: int = 0, rounds: int = 1, **settings: Any) -> list[np.ndarray]:
    """Of all prompts at once; `generating` other requests run beside them."""
    chosen = Settings(**(SMALL | settings))
    engine = Harness(chosen, load_runner(chosen, folder))
    for _ in range(rounds):
        for salt in range(generating):
            engine.add([salt + 1] * 20, max_tokens=30)
        numbers = [engine.add(ids, max_tokens=1, kind=Kind.POOL) for ids in PROMPTS]
        engine.drain()
    engine.assert_empty()
    if generating:
        assert engine.mailbox.load.preemptions > 0
    engine.close()
    return [np.frombuffer(engine.answers[number].vector, "<f4") for number in numbers]


def compare(found: list[np.ndarray], made: Made, kind: str) -> None:
    for vector, hidden in zip(found, made.hidden, strict=True):
        np.testing.assert_allclose(vector, pooled(hidden, kind).numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_equal_transformers(made: Made, kind: str) -> None:
    compare(vectors(made.folder, pooling=kind), made, kind)


@pytest.mark.parametrize("made", ["llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_preemption_and_the_prefix_cache_change_nothing(made: Made, kind: str, depth: int) -> None:
    # In Gemma's six groups a prompt has six times the blocks.
    blocks = 150 if "gemma3" in made.folder.name else 22
    small = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": blocks, "max_model_len": 72}
    found = vectors(made.folder, pooling=kind, async_depth=depth, generating=4, rounds=2, **small)
    compare(found, made, kind)


def test_a_decoder_that_was_saved_without_its_head(tmp_path: Path) -> None:
    """As embedding models are: its tensors' names begin where the model's own do."""
    theirs = tiny_llama(tmp_path, tie_word_embeddings=True).model
    config = (tmp_path / "config.json").read_text()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    compare(vectors(tmp_path), Made(tmp_path, hidden_states(theirs)), "last")


def test_what_is_pooled_by_default(made: Made) -> None:
    kind = "mean" if "bert" in made.folder.name else "last"
    facts = load_runner(Settings(**SMALL), made.folder).facts
    assert facts.pooling == Pooling(kind, True, 48) and facts.encoder is ("bert" in made.folder.name)


def test_ranks_make_the_vectors_that_one_does(made: Made) -> None:
    blocks = {} if "bert" in made.folder.name else {"num_gpu_blocks_override": 300}
    settings = Settings(max_num_seqs=8, block_size=8, pooling="mean", **blocks)
    counts = [-(-n // 8) for n in LENGTHS]

    def rank(group: Collective) -> list[np.ndarray]:
        runner = CPUModelRunner.load(settings, made.folder, group)
        groups = len(runner.facts.kv_groups)
        plan = Plan(
            epoch=1,
            step=1,
            rows=pack(range(len(PROMPTS))),
            generations=pack([0] * len(PROMPTS)),
            num_tokens=pack(LENGTHS),
            num_drafts=b"",
            num_logits=pack([1] * len(PROMPTS)),
            block_counts=pack(counts * groups),
            block_ids=pack(range(sum(counts) * groups)),
            new_rows=tuple(
                NewRow(row, 0, pack(ids), len(ids), 0, 0, 0, SamplingParams(max_tokens=1), pools=True)
                for row, ids in enumerate(PROMPTS)
            ),
        )
        runner.forward(plan)
        result = runner.sample(plan, None)
        return [np.frombuffer(result.vectors[row], "<f4") for row in range(len(PROMPTS))]

    for found in run_ranks(2, rank):
        compare(found, made, "mean")


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_prompt_is_cut_is_not_to_be_seen(kind: str) -> None:
    """And a row that has another prompt begins anew."""
    hidden = torch.randn(90, 8, generator=torch.Generator().manual_seed(0))
    pooler = Pooler(Pooling(kind, True, 8), 2)
    found = []
    for cuts in ((0, 90), (0, 1, 90), (0, 30, 31, 89, 90)):
        for first, end in itertools.pairwise(cuts):
            span = PooledSpan(1, first, slice(0, end - first), end == 90)
            complete = pooler.take(hidden[first:end], [span])
            assert list(complete) == ([1] if end == 90 else [])
        found.append(complete[1])
    assert all(torch.equal(vector, found[0]) for vector in found)
    torch.testing.assert_close(found[0], pooled(hidden, kind))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"max_model_len": 64, "max_num_batched_tokens": 32},
            "--max-model-len is 64, above --max-num-batched-tokens 32",
        ),
        (
            {"kv_cache_memory_bytes": 1 << 20},
            "--kv-cache-memory-bytes has no effect: the model is an encoder",
        ),
        ({"num_gpu_blocks_override": 9}, "--num-gpu-blocks-override has no effect"),
        ({"max_model_len": 65}, "--max-model-len is 65, above the model's own length 64"),
    ],
)
def test_what_an_encoder_cannot_do_is_refused_at_the_start(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    tiny_bert(tmp_path)
    with pytest.raises(SettingError, match=words):
        load_runner(Settings(max_num_seqs=8, **settings), tmp_path)


def test_an_encoder_is_no_longer_than_the_budget(tmp_path: Path) -> None:
    tiny_bert(tmp_path)
    facts = load_runner(Settings(max_num_seqs=8, max_num_batched_tokens=40), tmp_path).facts
    assert facts.max_model_len == 40
