"""The tie rule itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from servelite.worker.philox import gumbel_numpy
from tests.ties import Draw, Pair, TieReport, compare_tokens


def scorer_of(logits: Sequence[float]) -> object:
    return lambda ids: np.array(logits, np.float32)


def test_equal_answers_have_no_ties() -> None:
    assert compare_tokens([Pair("a", [1], [2, 3], [2, 3])], scorer_of([])) == TieReport(2, ())


def test_a_near_tie_is_counted_and_ends_the_comparison() -> None:
    seen = []

    def scorer(ids: Sequence[int]) -> npt.NDArray[np.float32]:
        seen.append(list(ids))
        return np.array([0, 1, 1.00005, 5], np.float32)

    report = compare_tokens([Pair("a", [9, 9], [3, 1, 0], [3, 2, 3, 3])], scorer)
    assert (report.tokens, len(report.ties)) == (2, 1)
    assert "a: token 1 is 2, expected 1" in report.ties[0]
    assert seen[0] == [9, 9, 3]


def test_a_difference_that_is_no_tie_fails() -> None:
    with pytest.raises(AssertionError, match="token 0 is 2, expected 1"):
        compare_tokens([Pair("a", [9], [1], [2])], scorer_of([0, 1, 1.0002]))


def test_an_answer_that_ends_early_fails() -> None:
    with pytest.raises(AssertionError, match="1 tokens, expected 2"):
        compare_tokens([Pair("a", [9], [1, 1], [1])], scorer_of([0, 1]))


def test_a_seeded_draws_score_has_its_noise_and_temperature() -> None:
    noise = gumbel_numpy([0, 1], 0, 2, 7)
    logits = [0.0, 0.5 * float(noise[0] - noise[1])]
    draw = Draw(temperature=0.5, seed=7, choice=2)
    assert len(compare_tokens([Pair("a", [9], [0], [1], draw)], scorer_of(logits)).ties) == 1
    with pytest.raises(AssertionError, match="token 0"):
        compare_tokens([Pair("a", [9], [0], [1], draw._replace(seed=8))], scorer_of(logits))


@pytest.mark.parametrize(("length", "ties", "fine"), [(10, 1, True), (10, 2, False), (2500, 2, True)])
def test_ties_may_be_no_more_than_one_in_two_thousand(length: int, ties: int, fine: bool) -> None:
    same = [Pair("same", [9], [0] * length, [0] * length)] * 2
    tied = [Pair("tied", [9], [0], [1])] * ties
    if fine:
        assert len(compare_tokens([*same, *tied], scorer_of([1, 1])).ties) == ties
    else:
        with pytest.raises(AssertionError, match="more than 1"):
            compare_tokens([*same, *tied], scorer_of([1, 1]))
