"""A stretch of the random walk of `soak.py`."""

from __future__ import annotations

import pytest

from tests.engine.soak import walk


def test_a_short_walk() -> None:
    assert walk(1_000, seed=10_000)[0] >= 1_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_long_walk() -> None:
    assert walk(12_000)[0] >= 12_000
