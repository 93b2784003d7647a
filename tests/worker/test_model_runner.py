"""The runner: same tokens alone, batched and chunked; the contract with the engine; bad rows."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from servelite.config import SettingError, Settings
from servelite.ipc.masks import pack_masks
from servelite.ipc.messages import FLAG, NewRow, Plan, RowFlag, SamplingParams, pack, unpack
from servelite.kernels.dispatch import REFERENCE
from servelite.loader.model import load_model
from servelite.models.base import CausalModel
from servelite.tokenizer.model_files import open_model_files
from servelite.worker.base import StepFailedError, StepGapError
from servelite.worker.load import load_runner
from servelite.worker.model_runner import CPUModelRunner
from tests.ties import Draw, Pair, compare_tokens, model_scorer
from tests.tiny_models import tiny_llama
from tests.worker.driver import Driver, Request

SETTINGS = Settings(max_num_seqs=16, num_gpu_blocks_override=400, block_size=8)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PENALISED = SamplingParams(
    max_tokens=20,
    temperature=0.8,
    repetition_penalty=1.2,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    logit_bias=((5, 2.0), (9, -3.0)),
    bad_words=((7,), (5, 6)),
    min_tokens=5,
    stop_token_ids=(5, 8),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, CausalModel]:
    folder = tmp_path_factory.mktemp("tiny")
    theirs = tiny_llama(folder)
    return folder, theirs, load_model(open_model_files(folder), REFERENCE)


@pytest.fixture
def runner(tiny: tuple[Path, Any, CausalModel]) -> CPUModelRunner:
    made = load_runner(SETTINGS, tiny[0])
    assert isinstance(made, CPUModelRunner)
    return made


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 257, length).tolist()


def mixed_requests(count: int) -> list[Request]:
    """Greedy and sampled rows with different parameters and prompt lengths of 1 to 70."""
    kinds = [
        GREEDY,
        SamplingParams(max_tokens=24, temperature=1.0),
        SamplingParams(max_tokens=17, temperature=0.7, top_p=0.9),
        SamplingParams(max_tokens=24, temperature=1.3, top_k=20, min_p=0.02),
        PENALISED,
    ]
    lengths = (1, 5, 8, 9, 33, 70, 16)
    return [
        Request(prompt(lengths[i % 7], i), kinds[i % 5], seed=2**63 + i, choice=i % 3) for i in range(count)
    ]


def test_greedy_tokens_equal_those_of_transformers(
    tiny: tuple[Path, Any, CausalModel], runner: CPUModelRunner
) -> None:
    _, theirs, model = tiny
    theirs.generation_config.eos_token_id = None
    driver, pairs = Driver(runner), []
    for number in range(4):
        ids = prompt(20 + number, 100 + number)
        with torch.inference_mode():
            out = theirs.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=64,
                do_sample=False,
                pad_token_id=0,
            )
        request = Request(ids, SamplingParams(max_tokens=64, temperature=0.0))
        got = driver.run([request], chunk=7)[0]
        pairs.append(Pair(f"prompt {number}", ids, out[0, len(ids) :].tolist(), got))
    assert compare_tokens(pairs, model_scorer(model)).tokens > 200


@pytest.mark.parametrize("chunk", [16, 3, 1 << 30])
def test_a_requests_tokens_do_not_depend_on_batch_or_chunk(
    chunk: int, tiny: tuple[Path, Any, CausalModel], runner: CPUModelRunner
) -> None:
    driver = Driver(runner)
    alone = [driver.run([request])[0] for request in mixed_requests(16)]
    requests = mixed_requests(16)
    together = driver.run(requests, chunk=chunk)
    pairs = [
        Pair(str(i), r.prompt, a, b, Draw(r.sampling.temperature, r.seed, r.choice))
        for i, (r, a, b) in enumerate(zip(requests, alone, together, strict=True))
    ]
    assert compare_tokens(pairs, model_scorer(tiny[2])).tokens > 300


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=20), PENALISED], ids=["plain", "penalised"])
def test_a_resumed_request_goes_on_as_it_would_have(sampling: SamplingParams, runner: CPUModelRunner) -> None:
    driver = Driver(runner)
    whole = driver.run([Request(prompt(12, 1), sampling, seed=77)])[0]
    resumed = Request(prompt(12, 1), sampling, seed=77, output=whole[:9])
    assert driver.run([resumed])[0] == whole


def one_step(runner: CPUModelRunner, step: int, tokens: list[int], sampling: SamplingParams = GREEDY) -> Plan:
    """A plan of one new row that computes and samples at once."""
    blocks = -(-len(tokens) // runner.facts.block_size)
    return Plan(
        epoch=4,
        step=step,
        rows=pack([0]),
        generations=pack([step]),
        num_tokens=pack([len(tokens)]),
        num_drafts=b"",
        num_logits=pack([1]),
        block_counts=pack([blocks]),
        block_ids=pack(range(blocks)),
        new_rows=(NewRow(0, step, pack(tokens), len(tokens), 0, 0, 0, sampling),),
    )


def test_a_gap_in_the_steps_is_an_error_whatever_the_first_is(runner: CPUModelRunner) -> None:
    for step in (7, 8):
        plan = one_step(runner, step, [1, 2, 3])
        runner.forward(plan)
        result = runner.sample(plan, None)
        assert (result.epoch, result.step) == (4, step)
    with pytest.raises(StepGapError, match="step 10 does not follow step 8"):
        runner.forward(one_step(runner, 10, [1, 2, 3]))


def test_a_row_of_another_generation_is_an_error(runner: CPUModelRunner) -> None:
    plan = one_step(runner, 1, [1, 2, 3])
    runner.forward(plan)
    runner.sample(plan, None)
    later = msgspec.structs.replace(
        plan,
        step=2,
        generations=pack([9]),
        num_tokens=pack([1]),
        new_rows=(),
        block_counts=pack([0]),
        block_ids=b"",
    )
    with pytest.raises(StepGapError, match="row 0 holds generation 1, step 2 wants 9"):
        runner.forward(later)


def test_a_result_has_times_and_a_checksum_and_chunks_sample_nothing(runner: CPUModelRunner) -> None:
    plan = one_step(runner, 1, [5, 6, 7])
    runner.forward(plan)
    result = runner.sample(plan, None)
    assert len(result.seconds) == 3
    assert all(0 < s < 5 for s in result.seconds)
    assert result.checksum == zlib.crc32(result.tokens)
    assert unpack(result.generations).tolist() == [1]
    chunk = msgspec.structs.replace(one_step(runner, 2, [5, 6, 7]), num_logits=pack([0]))
    runner.forward(chunk)
    empty = runner.sample(chunk, None)
    assert (empty.rows, empty.tokens, empty.flags) == (b"", b"", b"")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_leaves_only_what_it_allows(temperature: float, runner: CPUModelRunner) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=temperature)
    for step, allowed in enumerate([256, 31, 32, 0]):
        words = np.zeros((1, -(-257 // 32)), "<u4")
        words[0, allowed // 32] = 1 << allowed % 32
        plan = msgspec.structs.replace(one_step(runner, step, [5, 6, 7], sampling), needs_masks=True)
        runner.forward(plan)
        masks = pack_masks(unpack(plan.rows), words)
        assert unpack(runner.sample(plan, masks).tokens).tolist() == [allowed]


@pytest.mark.parametrize("part", ["forward", "head"])
def test_a_step_without_memory_fails_and_the_runner_goes_on(
    part: str, runner: CPUModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = one_step(runner, 1, [5, 6, 7])
    runner.forward(plan)
    expected = runner.sample(plan, None).tokens
    plan = one_step(runner, 2, [5, 6, 7])
    with monkeypatch.context() as patch, pytest.raises(StepFailedError, match="no memory"):
        patch.setattr(runner._model, part, lambda *_: torch.empty(1 << 50))
        runner.forward(plan)
        runner.sample(plan, None)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="another") as raised:
        patch.setattr(runner._model, part, lambda *_: (_ for _ in ()).throw(RuntimeError("another")))
        runner.forward(plan := one_step(runner, 3, [5, 6, 7]))
        runner.sample(plan, None)
    assert not isinstance(raised.value, StepFailedError)
    plan = one_step(runner, 4, [5, 6, 7])
    runner.forward(plan)
    assert runner.sample(plan, None).tokens == expected


def test_copied_blocks_stand_in_for_computed_ones(runner: CPUModelRunner) -> None:
    """Copy a finished prefix's block to a second row that starts behind it: the same next token."""
    tokens = prompt(11, 5)
    plan = one_step(runner, 1, tokens)
    runner.forward(plan)
    expected = unpack(runner.sample(plan, None).tokens).tolist()
    copied = Plan(
        epoch=4,
        step=2,
        rows=pack([1]),
        generations=pack([1]),
        num_tokens=pack([1]),
        num_drafts=b"",
        num_logits=pack([1]),
        block_counts=pack([2]),
        block_ids=pack([0, 9]),
        new_rows=(NewRow(1, 1, pack(tokens), 11, 10, 0, 0, GREEDY),),
        copies=pack([1, 9]),
    )
    runner.forward(copied)
    assert unpack(runner.sample(copied, None).tokens).tolist() == expected


def test_a_row_that_is_not_finite_is_flagged_alone_and_its_blocks_are_safe_to_reuse(
    tiny: tuple[Path, Any, CausalModel],
) -> None:
    model = load_model(open_model_files(tiny[0]), REFERENCE)
    bad = 13
    next(slot for slot in model.weights() if slot.name == "model.embed_tokens.weight").tensor[bad] = torch.nan
    healthy = load_runner(SETTINGS, tiny[0])
    runner = CPUModelRunner(model, replace(healthy.facts, num_blocks=24), SETTINGS.max_num_seqs)
    driver = Driver(runner)
    sampling = SamplingParams(max_tokens=6, temperature=1.0)
    clean = [token for token in prompt(60, 2) if token != bad]
    poisoned = Request([*clean[:10], bad, *clean[10:20]], sampling)
    neighbours = [Request(clean[:15], GREEDY), Request(clean[5:40], sampling, seed=4)]
    driver.run([neighbours[0], poisoned, neighbours[1]])
    assert set(poisoned.flags) == {RowFlag.NON_FINITE}
    assert all(0 <= token < 257 for token in poisoned.output)
    for request in neighbours:
        assert set(request.flags) == {RowFlag.OK}
    # The pool is small: these get the poisoned blocks, none of which they fill to the end at once.
    for _ in range(3):
        later = [Request(r.prompt, r.sampling, seed=r.seed) for r in neighbours]
        assert driver.run(later) == [r.output for r in neighbours]
        assert all(set(r.flags) == {RowFlag.OK} for r in later)


def test_the_facts_say_what_was_found(runner: CPUModelRunner) -> None:
    facts = runner.facts
    assert (facts.num_blocks, facts.block_size, facts.max_model_len, facts.vocab_size) == (400, 8, 512, 257)
    assert (facts.dtype, facts.device) == ("float32", "cpu")
    group = facts.kv_groups[0]
    assert (group.kind, group.layers, group.block_bytes) == ("full", (0, 1, 2), 3 * 2 * 8 * 2 * 8 * 4)
    assert [name for name, _ in facts.ledger] == ["open model", "load weights", "warm up"]


def test_a_block_of_one_token_works(tiny: tuple[Path, Any, CausalModel], runner: CPUModelRunner) -> None:
    small = load_runner(Settings(block_size=1, num_gpu_blocks_override=600, max_num_seqs=2), tiny[0])
    request, same = Request(prompt(9, 3), GREEDY), Request(prompt(9, 3), GREEDY)
    assert Driver(small).run([request], chunk=4) == Driver(runner).run([same])


def test_a_length_that_does_not_fit_is_refused(tiny: tuple[Path, Any, CausalModel]) -> None:
    with pytest.raises(SettingError, match="above the model's own length 512"):
        load_runner(Settings(max_model_len=600), tiny[0])


def test_flags_are_one_byte_a_row(runner: CPUModelRunner) -> None:
    plan = one_step(runner, 1, [5])
    runner.forward(plan)
    assert unpack(runner.sample(plan, None).flags, FLAG).tolist() == [0]


def test_each_layer_is_a_sign_of_life(tiny: tuple[Path, Any, CausalModel], runner: CPUModelRunner) -> None:
    beats: list[int] = []
    runner.watch(lambda: beats.append(1))
    Driver(runner).run([Request(prompt(5, 1), SamplingParams(max_tokens=3))])
    assert len(beats) == 3 * tiny[1].config.num_hidden_layers
