"""What keeping a request resumable costs a front end, as `benchmarks/recovery_bookkeeping.py` measures it."""

from __future__ import annotations

import pytest

from benchmarks.recovery_bookkeeping import CASES, Case, ForgetfulRecord, cost, measure
from servelite.frontend.engine_client import EngineClient

TARGET_US = 0.3  # of CPU time a token; CONTRIBUTING.md: a test asserts a time with fivefold slack


async def test_a_token_costs_next_to_nothing() -> None:
    assert Case(64) in CASES
    figures = await measure(Case(64), tokens=150, pairs=5)
    assert cost(figures) < 5 * TARGET_US, figures


async def test_both_paths_hand_out_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(await measure(Case(3, logprobs=2), tokens=10, pairs=1)) == 1
    monkeypatch.setattr(ForgetfulRecord, "take", lambda self: [1])
    with pytest.raises(ValueError, match="tokens that add up to"):
        await measure(Case(3), tokens=10, pairs=1)


async def test_what_it_costs_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the bookkeeping dear, the figure would say so: the other path has none of it."""
    take = EngineClient._take_outputs

    def dear(self: object, outputs: object) -> None:
        for _ in range(20_000):
            pass
        take(self, outputs)

    monkeypatch.setattr(EngineClient, "_take_outputs", dear)
    assert cost(await measure(Case(4), tokens=50, pairs=3)) > 5 * TARGET_US
