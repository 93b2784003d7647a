"""Logprobs against log-softmax in float64, and through the runner against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servelite.config import Settings
from servelite.ipc.messages import SamplingParams, TokenLogprobs, unpack
from servelite.worker.load import load_runner
from servelite.worker.logprobs import TILE, prompt_logprobs, score_tokens
from servelite.worker.model_runner import CPUModelRunner
from tests.tiny_models import tiny_llama
from tests.worker.driver import Driver, Request

FLOAT = np.dtype("<f4")


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    z = logits.astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("vocab", [5, 1000, 49152])
def test_scores_are_those_of_log_softmax_the_best_first_and_ties_by_id(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    logits = (random.normal(size=(TILE + 9, vocab)) * 4).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[5] = 2.5
    k = random.choice([0, 1, 3, 5], size=len(logits))
    tokens = random.integers(0, vocab, len(logits))
    before = logits.copy()
    scores = score_tokens(torch.from_numpy(logits), torch.from_numpy(tokens), k)
    assert np.array_equal(logits, before)
    expected = log_softmax(logits)
    np.testing.assert_allclose(scores.chosen, expected[np.arange(len(logits)), tokens], atol=1e-5)
    at = 0
    for line, values, count in zip(logits, expected, k.tolist(), strict=True):
        best = np.lexsort((np.arange(vocab), -line))[:count]
        assert scores.ids[at : at + count].tolist() == best.tolist()
        np.testing.assert_allclose(scores.values[at : at + count], values[best], atol=1e-5)
        at += count
    assert at == len(scores.ids) == len(scores.values)


@given(order=st.lists(st.integers(0, 9), min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_a_rows_scores_do_not_depend_on_its_batch(order: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(np.round(random.normal(size=(10, 300)) * 4).astype(np.float32) / 4)
    tokens, k = torch.from_numpy(random.integers(0, 300, 10)), random.integers(0, 9, 10)
    alone = [score_tokens(logits[[i]], tokens[[i]], k[[i]]) for i in order]
    together = score_tokens(logits[order], tokens[order], k[order])
    for name in ("chosen", "ids", "values"):
        expected = np.concatenate([getattr(part, name) for part in alone])
        assert np.array_equal(getattr(together, name), expected)


def test_a_prompts_logits_are_never_more_than_a_tile() -> None:
    table = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    hidden, tokens = table[torch.arange(3 * TILE + 1) % 50], torch.arange(3 * TILE + 1) % 50
    sizes = []

    def logits_of(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(part))
        return part @ table.T, torch.ones(len(part), dtype=torch.bool)

    scores = prompt_logprobs(logits_of, hidden, tokens, 1, 2)
    assert sizes == [TILE, TILE, TILE, 1]
    assert scores is not None
    assert len(unpack(scores.chosen, FLOAT)) == len(tokens)
    assert len(unpack(scores.ids)) == len(unpack(scores.values, FLOAT)) == 2 * len(tokens)


# ---------------------------------------------------------------- through the runner


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny_llama(folder)


@pytest.fixture
def runner(tiny: tuple[Path, Any]) -> CPUModelRunner:
    made = load_runner(Settings(max_num_seqs=8, num_gpu_blocks_override=400, block_size=8), tiny[0])
    assert isinstance(made, CPUModelRunner)
    return made


def check(parts: Sequence[TokenLogprobs], first: int, k: int, ids: list[int], expected: np.ndarray) -> None:
    """`parts` are the logprobs of ids[first:], in order; `expected` is log-softmax [ids, vocab]."""
    at = first
    for part in parts:
        assert (part.first_index, part.k) == (at, k)
        chosen = unpack(part.chosen, FLOAT)
        best = unpack(part.ids).reshape(len(chosen), k)
        values = unpack(part.values, FLOAT).reshape(len(chosen), k)
        for i, value in enumerate(chosen):
            line = expected[at - 1 + i]
            np.testing.assert_allclose(value, line[ids[at + i]], atol=2e-4)
            np.testing.assert_allclose(values[i], np.sort(line)[::-1][:k], atol=2e-4)
            np.testing.assert_allclose(values[i], line[best[i]], atol=2e-4)
        at += len(chosen)
    assert at == len(ids)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 30])
def test_logprobs_are_of_the_models_own_distribution(
    chunk: int, tiny: tuple[Path, Any], runner: CPUModelRunner
) -> None:
    """Whatever bias, penalties and temperature do to the draw; beside rows that want none or others."""
    sampling = SamplingParams(
        max_tokens=6,
        temperature=0.6,
        logit_bias=((3, 50.0), (4, -50.0)),
        presence_penalty=2.0,
        allowed_token_ids=(3, 4, 5, 6),
        logprobs=3,
        prompt_logprobs=2,
    )
    greedy = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)
    random = np.random.default_rng(2)
    requests = [
        Request(random.integers(0, 257, 150).tolist(), sampling, seed=5),
        Request(random.integers(0, 257, 9).tolist(), SamplingParams(max_tokens=6)),
        Request(random.integers(0, 257, 1).tolist(), greedy),
    ]
    Driver(runner).run(requests, chunk=chunk)
    for request in requests:
        ids = request.prompt + request.output
        with torch.inference_mode():
            expected = log_softmax(tiny[1](torch.tensor([ids])).logits[0].numpy())
        begin, k = len(request.prompt), request.sampling.logprobs
        indices = [part.first_index for part in request.logprobs]
        assert indices == (list(range(6)) if k >= 0 else [])
        if k >= 0:
            shifted = [
                TokenLogprobs(p.first_index + begin, p.k, p.chosen, p.ids, p.values) for p in request.logprobs
            ]
            check(shifted, begin, k, ids, expected)
        if request.sampling.prompt_logprobs >= 0:
            check(request.prompt_logprobs, 1, 2, request.prompt, expected)
        else:
            assert request.prompt_logprobs == []
    assert set(requests[0].output) <= {3, 5, 6}


def test_more_alternatives_than_the_vocabulary_are_all_of_it(runner: CPUModelRunner) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1000, prompt_logprobs=1000)
    request = Request([5, 6, 7], sampling)
    Driver(runner).run([request])
    for part, count in ((request.logprobs[0], 1), (request.prompt_logprobs[0], 2)):
        assert part.k == 257
        ids = unpack(part.ids).reshape(count, 257)
        assert (np.sort(ids, axis=1) == np.arange(257)).all()
        np.testing.assert_allclose(np.exp(unpack(part.values, FLOAT)).sum(), count, atol=1e-3)


def test_a_prompt_of_one_token_has_no_prompt_logprobs(runner: CPUModelRunner) -> None:
    request = Request([5], SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1))
    Driver(runner).run([request])
    assert request.prompt_logprobs == []
    assert len(request.output) == 3


def test_a_row_that_is_not_finite_has_no_logprobs_and_takes_none_from_others(
    tiny: tuple[Path, Any], runner: CPUModelRunner
) -> None:
    weight = next(s for s in runner._model.weights() if s.name == "model.embed_tokens.weight").tensor
    weight[13] = torch.nan
    sampling = SamplingParams(max_tokens=2, temperature=1.0, logprobs=2, prompt_logprobs=1)
    bad, good = Request([1, 2, 13, 4], sampling), Request([1, 2, 3, 4], sampling)
    Driver(runner).run([bad, good])
    assert bad.logprobs == bad.prompt_logprobs == []
    assert len(good.logprobs) == 2
    assert len(good.prompt_logprobs) == 1


def test_logprobs_do_not_change_what_is_drawn(runner: CPUModelRunner) -> None:
    driver = Driver(runner)
    for temperature in (0.0, 1.0):
        plain = Request([5, 6, 7], SamplingParams(max_tokens=12, temperature=temperature), seed=1)
        scored = Request(
            [5, 6, 7],
            SamplingParams(max_tokens=12, temperature=temperature, logprobs=2, prompt_logprobs=0),
            seed=1,
        )
        assert driver.run([plain]) == driver.run([scored])
