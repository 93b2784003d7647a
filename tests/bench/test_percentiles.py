"""Percentiles are exact, by nearest rank."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelite.bench.percentiles import Distribution, percentile


@pytest.mark.parametrize(
    ("count", "percent", "wanted"),
    [(1, 50, 1), (1, 99, 1), (2, 50, 1), (2, 51, 2), (100, 99, 99), (100, 100, 100), (101, 99, 100),
     (10, 90, 9), (11, 90, 10), (1000, 1, 10), (99, 99, 99)],
)  # fmt: skip
def test_the_percentile_of_1_to_count(count: int, percent: int, wanted: int) -> None:
    assert percentile(range(1, count + 1), percent) == wanted


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(1, 100))
def test_it_is_the_least_sample_that_so_many_do_not_exceed(samples: list[float], percent: int) -> None:
    def reached(value: float) -> bool:
        return Fraction(sum(s <= value for s in samples), len(samples)) >= Fraction(percent, 100)

    assert percentile(sorted(samples), percent) == min(s for s in samples if reached(s))


def test_a_distribution() -> None:
    assert Distribution.of([]) is None
    assert Distribution.of([4.0, 1.0, 2.0, 3.0]) == Distribution(4, 2.5, 2.0, 4.0, 4.0, 4.0)
