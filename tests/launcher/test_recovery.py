"""Who is resubmitted after which death of the engine, without an engine."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelite.launcher.recovery import (
    MOST_RESTARTS,
    WINDOW_S,
    GiveUp,
    Key,
    Recovery,
    Release,
    Restart,
)

A, B, C, D = [(0, n) for n in range(4)]


def test_a_death_from_outside_accuses_nobody() -> None:
    recovery = Recovery()
    assert recovery.died(0, inside=False, in_flight=[A, B]) == Restart()
    assert not recovery.searching
    assert recovery.up() == Release(None)


def test_deaths_from_outside_are_answered_more_slowly_and_then_no_more() -> None:
    recovery, delays = Recovery(), []
    for n in range(MOST_RESTARTS):
        restart = recovery.died(n, inside=False, in_flight=[A])
        assert isinstance(restart, Restart)
        delays.append(restart.delay)
        recovery.up()
    assert delays == sorted(delays) and delays[0] == 0 < delays[1]
    assert recovery.died(9, inside=False, in_flight=[A]) == GiveUp("it died too often: 6 times in 10 minutes")
    assert isinstance(recovery.died(WINDOW_S + 1.5, inside=False, in_flight=[A]), Restart)


def test_an_engine_that_does_not_come_up_is_not_started_for_ever() -> None:
    recovery = Recovery()
    recovery.died(0, inside=True, in_flight=[A, B])
    for n in range(MOST_RESTARTS):  # dies while it loads: whatever was in flight before is not to blame
        assert isinstance(recovery.died(n, inside=True, in_flight=[]), Restart)
    assert isinstance(recovery.died(9, inside=True, in_flight=[]), GiveUp)


def test_suspects_are_tried_in_halves_and_then_alone() -> None:
    recovery = Recovery()
    assert recovery.died(0, inside=True, in_flight=[A, B, C, D]) == Restart()
    assert recovery.up() == Release(frozenset([A, B]))
    assert recovery.died(0, inside=True, in_flight=[A, B]) == Restart()
    assert recovery.up() == Release(frozenset([A]))
    assert recovery.passed([A]) == Release(frozenset([B]))
    # A ran beside it: once more, and nobody beside.
    assert recovery.died(0, inside=True, in_flight=[A, B]) == Restart()
    assert recovery.up() == Release(frozenset([B]))
    assert recovery.died(0, inside=True, in_flight=[B]) == Restart(quarantined=B)
    assert recovery.up() == Release(None)
    assert not recovery.searching


def test_a_lone_request_is_tried_once_more_before_it_is_quarantined() -> None:
    recovery = Recovery()
    assert recovery.died(0, inside=True, in_flight=[A]) == Restart()
    assert recovery.up() == Release(frozenset([A]))
    assert recovery.died(0, inside=True, in_flight=[A]) == Restart(quarantined=A)


def test_suspects_that_all_pass_are_free() -> None:
    recovery = Recovery()
    recovery.died(0, inside=True, in_flight=[A, B, C])
    assert recovery.up() == Release(frozenset([A, B]))
    assert recovery.passed([A]) is None
    assert recovery.passed([B]) == Release(frozenset([C]))
    assert recovery.passed([C]) == Release(None)
    assert recovery.passed([D]) is None


def test_a_suspect_that_ends_while_it_waits_is_none_any_more() -> None:
    recovery = Recovery()
    recovery.died(0, inside=True, in_flight=[A, B, C, D])
    assert recovery.passed([C, D]) is None  # their clients left before the engine was up
    assert recovery.up() == Release(frozenset([A]))
    assert recovery.passed([A]) == Release(frozenset([B]))


def test_a_death_from_outside_during_a_search_repeats_the_probe() -> None:
    recovery = Recovery()
    recovery.died(0, inside=True, in_flight=[A, B])
    assert recovery.up() == Release(frozenset([A]))
    recovery.died(1, inside=False, in_flight=[A])
    assert recovery.up() == Release(frozenset([A]))


def test_an_engine_that_dies_under_everybody_is_given_up() -> None:
    recovery = Recovery()
    for n in range(100):
        decision = recovery.died(0, inside=True, in_flight=[(0, n // 2)])
        if isinstance(decision, GiveUp):
            assert n > 8
            return
        recovery.up()
    pytest.fail("it was restarted a hundred times")


@given(count=st.integers(1, 64), seed=st.integers())
def test_whoever_kills_is_found_and_nobody_else(count: int, seed: int) -> None:
    """Any one killer among any number of requests, in a logarithm of restarts."""
    rng = random.Random(seed)
    everybody: list[Key] = [(rng.randrange(3), n) for n in range(count)]
    killer = rng.choice(everybody)
    recovery, running, deaths = Recovery(), set(everybody), 0
    while True:
        # A step of some of those that run, with everybody who was just released.
        deaths += 1
        decision = recovery.died(0.0, inside=True, in_flight=running)
        assert isinstance(decision, Restart)
        if decision.quarantined is not None:
            assert decision.quarantined == killer
            break
        release, running = recovery.up(), set()
        while killer not in running:
            assert release is not None and release.keys is not None
            running |= release.keys
            if killer not in release.keys:
                release = recovery.passed(release.keys)
    assert deaths <= 2 * math.ceil(math.log2(count) if count > 1 else 1) + 3
    assert recovery.up() == Release(None)
