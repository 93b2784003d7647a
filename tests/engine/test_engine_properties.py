"""Random arrivals, aborts and shortages: the engine's books hold after every step, and every answer
is the one its request gets alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hypothesis import given
from hypothesis import strategies as st

from servelite.engine.policies import POLICIES
from servelite.ipc.messages import FinishReason
from tests.engine_harness import prompt, simulated


@dataclass(frozen=True)
class Arrival:
    turns_before: int
    length: int
    salt: int  # requests of one salt begin alike
    max_tokens: int
    stop: bool
    abort_after: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        turns_before=st.integers(0, 6),
        length=st.integers(1, 60),
        salt=st.integers(0, 2),
        max_tokens=st.integers(1, 30),
        stop=st.booleans(),
        abort_after=st.none() | st.integers(0, 20),
    ),
    min_size=1,
    max_size=14,
)


def shared_prompt(length: int, salt: int) -> list[int]:
    return prompt(64, salt)[:length]


@lru_cache(maxsize=8192)
def alone(length: int, salt: int, max_tokens: int, windows: tuple[int, ...], stop: bool) -> tuple[int, ...]:
    harness = simulated(windows=windows)
    number = harness.add(shared_prompt(length, salt), max_tokens=max_tokens, seed=5)
    harness.drain()
    harness.close()
    tokens = tuple(harness.answers[number].tokens)
    return tokens[: tokens.index(tokens[-1]) + 1] if stop else tokens


@given(
    ARRIVALS,
    st.integers(1, 3),
    st.integers(24, 60),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([(), (6,), (17,)]),
    st.sampled_from(sorted(POLICIES)),
)
def test_whatever_comes_the_books_hold_and_answers_are_those_given_alone(
    arrivals: list[Arrival], depth: int, blocks: int, budget: int, windows: tuple[int, ...], policy: str
) -> None:
    harness = simulated(
        windows=windows,
        async_depth=depth,
        num_gpu_blocks_override=blocks * (1 + len(windows)),
        max_num_batched_tokens=budget,
        scheduling_policy=policy,
    )
    numbers: dict[int, Arrival] = {}
    aborts: list[tuple[int, int]] = []  # (turn, number)
    turn = 0
    for arrival in arrivals:
        for _ in range(arrival.turns_before):
            turn += 1
            for number in [n for at, n in aborts if at == turn]:
                harness.abort(number)
            harness.turn()
            harness.scheduler.requests.check()
        whole = alone(arrival.length, arrival.salt, arrival.max_tokens, windows, False)
        number = harness.add(
            shared_prompt(arrival.length, arrival.salt),
            max_tokens=arrival.max_tokens,
            seed=5,
            stop_token_ids=whole[-1:] if arrival.stop else (),
            priority=arrival.salt,
        )
        numbers[number] = arrival
        if arrival.abort_after is not None:
            aborts.append((turn + 1 + arrival.abort_after, number))
    while aborts and turn < max(at for at, _ in aborts):
        turn += 1
        for number in [n for at, n in aborts if at == turn]:
            harness.abort(number)
        harness.turn()
        harness.scheduler.requests.check()
    harness.drain()
    harness.assert_empty()
    harness.close()
    for number, arrival in numbers.items():
        expected = alone(arrival.length, arrival.salt, arrival.max_tokens, windows, arrival.stop)
        answer = harness.answers.get(number)
        got = tuple(answer.tokens) if answer else ()
        if answer is None or answer.finish is FinishReason.NONE:
            assert arrival.abort_after is not None, "only an aborted request may stay without an end"
            assert got == expected[: len(got)]
        else:
            assert got == expected
