"""Bias, penalties and token masks by their definitions, and that they follow a row's tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servelite.ipc.messages import SamplingParams
from servelite.worker.logits_processors import LogitsProcessors
from servelite.worker.token_counts import TokenCounts

VOCAB = 40
PROMPT, OUTPUT = [3, 9, 9, 12], [5, 9, 5, 20]
LOGITS = torch.from_numpy(np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 3)


def applied(output: list[int] = OUTPUT, **fields: Any) -> torch.Tensor:
    """LOGITS after the passes of one row with PROMPT and `output`."""
    tokens = np.array([PROMPT + output], np.int32)
    processors = LogitsProcessors(1, VOCAB)
    processors.occupy(0, SamplingParams(max_tokens=9, **fields), tokens[0], len(PROMPT))
    logits, row = LOGITS.clone()[None], np.array([0], np.int32)
    processors.apply(logits, row, tokens, np.array([tokens.shape[1]]), np.array([len(PROMPT)]))
    return logits[0]


def changed(logits: torch.Tensor) -> dict[int, float]:
    where = torch.nonzero(logits != LOGITS).flatten().tolist()
    return {i: pytest.approx(float(logits[i] - LOGITS[i]), abs=1e-5) for i in where}


def test_presence_and_frequency_are_of_output_tokens() -> None:
    assert changed(applied(presence_penalty=0.5)) == {5: -0.5, 9: -0.5, 20: -0.5}
    assert changed(applied(frequency_penalty=0.25)) == {5: -0.5, 9: -0.25, 20: -0.25}
    assert changed(applied([], presence_penalty=0.5, frequency_penalty=0.25)) == {}


def test_bias_is_added_to_its_tokens() -> None:
    assert changed(applied(logit_bias=((0, 1.5), (39, -100.0)))) == {0: 1.5, 39: -100.0}


@pytest.mark.parametrize("count", [0, 2, 3, 4])
def test_no_stop_token_before_min_tokens(count: int) -> None:
    logits = applied(OUTPUT[:count], min_tokens=3, stop_token_ids=(2, 7))
    assert torch.nonzero(logits == -torch.inf).flatten().tolist() == ([2, 7] if count < 3 else [])


def test_only_allowed_tokens_are_left() -> None:
    logits = applied(allowed_token_ids=(4, 17, 4))
    assert torch.nonzero(logits > -torch.inf).flatten().tolist() == [4, 17]
    assert logits[17] == LOGITS[17]


@pytest.mark.parametrize(
    ("word", "output", "forbidden"),
    [
        ((30,), OUTPUT, [30]),
        ((20, 31), OUTPUT, [31]),
        ((5, 20, 32), OUTPUT, [32]),
        ((9, 20, 32), OUTPUT, []),
        ((12, 33), [], [33]),  # the prompt's last token begins it
        ((9, 12, 5, 33), [5], [33]),  # over the border
        ((1, 3, 9, 9, 12, 33), [], []),  # longer than what is there
    ],
)
def test_a_bad_word_loses_its_last_token_where_its_beginning_stands(
    word: tuple[int, ...], output: list[int], forbidden: list[int]
) -> None:
    for others in ((), ((38, 39), (37, 36, 35, 34, 33))):
        logits = applied(output, bad_words=(word, *others))
        assert torch.nonzero(logits == -torch.inf).flatten().tolist() == forbidden


def test_repetition_and_bad_words_are_those_of_transformers(tmp_path: Path) -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from transformers.generation import logits_process

    ids = torch.tensor([PROMPT + OUTPUT])
    repetition = logits_process.RepetitionPenaltyLogitsProcessor(1.3)(ids, LOGITS.clone()[None])
    torch.testing.assert_close(applied(repetition_penalty=1.3), repetition[0])
    words = [[30], [20, 31], [5, 20, 32], [9, 5, 20, 33], [2, 3], [20, 2, 7]]
    bad = logits_process.NoBadWordsLogitsProcessor(words, eos_token_id=None)(ids, LOGITS.clone()[None])
    torch.testing.assert_close(applied(bad_words=tuple(map(tuple, words))), bad[0])


def test_ids_outside_the_models_vocabulary_change_nothing() -> None:
    logits = applied(
        logit_bias=((VOCAB, 5.0), (-1, 5.0)), stop_token_ids=(VOCAB + 3,), min_tokens=9, bad_words=((VOCAB,),)
    )
    assert changed(logits) == {}


def test_a_row_without_rules_costs_no_pass() -> None:
    processors = LogitsProcessors(3, VOCAB)
    plain, ruled = (
        SamplingParams(max_tokens=9, stop_token_ids=(2,)),
        SamplingParams(9, min_tokens=2, stop_token_ids=(2,)),
    )
    for row, sampling in enumerate((plain, ruled, plain)):
        processors.occupy(row, sampling, np.array([1], np.int32), 1)
    assert not processors.used_by(np.array([0, 2], np.int32))
    assert processors.used_by(np.array([0, 1], np.int32))
    processors.occupy(1, plain, np.array([1], np.int32), 1)
    assert not processors.used_by(np.array([1], np.int32))


def test_counts_grow_only_with_the_rows_that_need_them_and_are_reused() -> None:
    counts = TokenCounts(256, VOCAB)
    prompt, output = np.array([1, 2], np.int32), np.array([2, 2], np.int32)
    assert len(counts.output) == 0
    for row in (200, 7, 100):
        counts.rebuild(row, prompt, output)
    held = len(counts.output)
    assert held <= 4
    counts.drop(7)
    counts.drop(7)
    counts.rebuild(9, prompt, np.array([5], np.int32))
    counts.rebuild(9, prompt, output)
    assert len(counts.output) == held
    lines = counts.lines(np.array([200, 100, 9], np.int32)).tolist()
    assert len(set(lines)) == 3
    assert counts.output[lines, 2].tolist() == [2, 2, 2]
    assert counts.output[lines].sum() == 6, "a line kept what its row had before"
    assert counts.seen[lines].sum() == 6


def test_counts_follow_what_is_sampled_as_if_it_had_been_there() -> None:
    random = np.random.default_rng(3)
    counts = TokenCounts(6, VOCAB)
    tokens = {row: [1, 2, 3] for row in (0, 2, 5)}
    for row in tokens:
        counts.rebuild(row, np.array([1, 2, 3], np.int32), np.empty(0, np.int32))
    for _ in range(50):
        rows = random.permutation(6)[: random.integers(1, 7)].astype(np.int32)
        drawn = random.integers(0, VOCAB, len(rows))
        counts.add(rows, drawn)
        for row, token in zip(rows.tolist(), drawn.tolist(), strict=True):
            tokens.get(row, []).append(token)
    fresh = TokenCounts(6, VOCAB)
    for row, all_tokens in tokens.items():
        fresh.rebuild(row, np.array(all_tokens[:3], np.int32), np.array(all_tokens[3:], np.int32))
        at = np.array([row], np.int32)
        assert torch.equal(fresh.output[fresh.lines(at)], counts.output[counts.lines(at)])
        assert torch.equal(fresh.seen[fresh.lines(at)], counts.seen[counts.lines(at)])
