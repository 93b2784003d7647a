"""Prefix hits, pending blocks, salts, window groups, and what a corrupted row takes back."""

from __future__ import annotations

from typing import Any

import pytest

from servelite.ipc.messages import FLAG, RowFlag, StepResult, pack, unpack
from servelite.ipc.states import State
from tests.engine_harness import CLIENT, Harness, prompt, simulated

BLOCK = 4


def answer(harness: Harness, tokens: list[int], **fields: Any) -> list[int]:
    number = harness.add(tokens, **({"max_tokens": 4, "seed": 1} | fields))
    harness.drain()
    return harness.answers[number].tokens


def hits(harness: Harness) -> int:
    return harness.scheduler.requests.totals.prefix_hits


@pytest.mark.parametrize("windows", [(), (9,), (8, 30)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_hit_at_every_offset_around_a_border_gives_the_same_tokens(depth: int, windows: tuple) -> None:
    base = prompt(64)
    for length in range(17, 34):
        tokens = [*base[:length], *prompt(9, length)]
        cold = simulated(windows=windows, async_depth=depth)
        expected = answer(cold, tokens)
        cold.close()
        warm = simulated(windows=windows, async_depth=depth)
        answer(warm, base[: length + 3])
        assert answer(warm, tokens) == expected
        assert hits(warm) == length // BLOCK * BLOCK
        warm.assert_empty()
        warm.close()


def test_a_hit_is_capped_below_the_prompts_length() -> None:
    for length in (15, 16, 17):
        harness = simulated()
        first = answer(harness, prompt(length))
        assert answer(harness, prompt(length)) == first
        assert hits(harness) == (length - 1) // BLOCK * BLOCK
        harness.close()


def test_output_is_cached_too() -> None:
    harness = simulated()
    tokens = answer(harness, prompt(10), max_tokens=20)
    answer(harness, [*prompt(10), *tokens, 5])
    assert hits(harness) == 28, "10 + 20 tokens, of which the last was never computed: 29, seven blocks"
    harness.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pending_block_serves_later_steps_only(depth: int) -> None:
    harness = simulated(async_depth=depth, max_num_batched_tokens=200)
    tokens = prompt(40)
    a, b = harness.add(tokens, seed=1), harness.add(tokens, seed=1)
    harness.turn()
    assert hits(harness) == 0, "both were scheduled in one step"
    c = harness.add(tokens, seed=1)
    harness.turn()
    assert hits(harness) == 36
    harness.drain()
    assert harness.answers[a].tokens == harness.answers[b].tokens == harness.answers[c].tokens
    harness.assert_empty()
    harness.close()


def test_salts_do_not_share_and_caching_can_be_off() -> None:
    harness = simulated()
    answer(harness, prompt(20), cache_salt="a")
    answer(harness, prompt(20), cache_salt="b")
    answer(harness, prompt(20))
    assert hits(harness) == 0
    answer(harness, prompt(20), cache_salt="a")
    assert hits(harness) == 16
    harness.close()
    off = simulated(enable_prefix_caching=False)
    answer(off, prompt(20))
    answer(off, prompt(20))
    assert hits(off) == 0
    off.close()


def test_running_requests_share_blocks_and_a_published_block_is_never_written() -> None:
    harness = simulated(max_num_seqs=4)
    tokens = prompt(33)
    answer(harness, tokens)
    numbers = [harness.add(tokens, max_tokens=20, seed=i) for i in range(4)]
    harness.turn(2)
    kv = harness.scheduler.kv
    rows = [harness.scheduler.requests.find((CLIENT, n)).row for n in numbers]
    shared = kv.tables[0, rows, :8]
    assert (shared == shared[0]).all() and kv.pool.refs[shared[0, 0]] == 4
    executor = harness.executor
    forward = executor.forward

    def checked(plan: Any) -> Any:
        begin = kv_start(harness, plan)
        for row, position in begin:
            block = int(kv.tables[0, row, position // BLOCK])
            full_now = position // BLOCK < kv.published[row] and kv.pool.published_in[block] == plan.step
            assert not kv.pool.is_published(block) or full_now, (
                f"step {plan.step} writes published block {block}"
            )
        return forward(plan)

    executor.forward = checked  # type: ignore[method-assign]
    harness.drain()
    harness.assert_empty()
    harness.close()


def kv_start(harness: Harness, plan: Any) -> list[tuple[int, int]]:
    """(row, position) of all that the plan writes."""
    found = []
    for row, count in zip(unpack(plan.rows).tolist(), unpack(plan.num_tokens).tolist(), strict=True):
        end = int(harness.scheduler.requests.rows.num_computed[row])
        found += [(row, position) for position in range(end - count, end)]
    return found


def test_the_oldest_unused_blocks_go_first() -> None:
    harness = simulated(num_gpu_blocks_override=12, max_num_seqs=1)
    for salt in range(3):
        answer(harness, prompt(16, salt), max_tokens=1)  # 4 blocks each: the pool is full of content
    answer(harness, prompt(12, 9), max_tokens=1)  # takes three blocks of the oldest
    before = hits(harness)
    answer(harness, [*prompt(16, 2), 1], max_tokens=1)
    assert hits(harness) - before == 16
    before = hits(harness)
    answer(harness, [*prompt(16, 0), 1], max_tokens=1)
    assert hits(harness) - before <= 4, "at most its head is left: tails go first"
    harness.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_window_layers_hold_little_and_still_get_hits(depth: int) -> None:
    window, chunk = 64, 32
    harness = simulated(
        windows=(window,), max_model_len=4096, max_num_batched_tokens=chunk, async_depth=depth, max_num_seqs=2
    )
    tokens = prompt(4000)
    number = harness.add(tokens, max_tokens=8)
    bound = -(-(window - 1 + depth * chunk) // BLOCK) + 1
    kv = harness.scheduler.kv
    most = 0
    while harness.scheduler.requests.find((CLIENT, number)) is not None or not harness.answers:
        harness.turn()
        most = max(most, int((kv.counts[1] - kv.first[1]).max()))
    assert window // BLOCK <= most <= bound
    expected = harness.answers[number].tokens
    harness.drain()
    again = harness.add(tokens, max_tokens=8, seed=number)
    harness.drain()
    assert harness.answers[again].tokens == expected
    assert hits(harness) == 3996
    harness.assert_empty()
    harness.close()


def test_a_window_group_needs_only_the_blocks_it_can_see() -> None:
    harness = simulated(windows=(9,), max_num_seqs=1)
    answer(harness, prompt(64), max_tokens=1)
    pool = harness.scheduler.kv.pool
    names = harness.scheduler  # the head of the window group goes, as LRU eviction would take it
    assert names is not None
    window_blocks = list(pool._by_hash[1].values())
    for block in window_blocks[:6]:
        pool.unpublish(block)
    answer(harness, [*prompt(64), 7], max_tokens=1)
    assert hits(harness) == 64
    for block in list(pool._by_hash[1].values()):
        pool.unpublish(block)
    before = hits(harness)
    answer(harness, [*prompt(64), 7, 8], max_tokens=1)
    assert hits(harness) == before
    harness.close()


def flag_row(harness: Harness, number: int) -> None:
    """From the next step on, this request's row is reported as not finite."""
    runner = harness.executor._runner
    sample = runner.sample

    def flagged(plan: Any, masks: bytes | None) -> StepResult:
        result = sample(plan, masks)
        request = harness.scheduler.requests.find((CLIENT, number))
        flags = [
            RowFlag.NON_FINITE if request is not None and row == request.row else RowFlag.OK
            for row in unpack(result.rows).tolist()
        ]
        import msgspec

        return msgspec.structs.replace(result, flags=pack(flags, FLAG))

    runner.sample = flagged  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_that_is_not_finite_ends_alone(depth: int) -> None:
    calm = simulated(async_depth=depth)
    expected = answer(calm, prompt(20, 1), max_tokens=12)
    calm.close()
    harness = simulated(async_depth=depth)
    bad = harness.add(prompt(20), max_tokens=12)
    good = harness.add(prompt(20, 1), max_tokens=12, seed=1)
    harness.turn(3)
    flag_row(harness, bad)
    harness.drain()
    assert harness.answers[bad].error is not None and harness.answers[bad].error.code == "non_finite_logits"
    assert harness.answers[good].tokens == expected
    assert harness.mailbox.load.corrupted == 1
    harness.assert_empty()
    harness.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_corrupted_row_computed_is_found_by_nobody_and_its_sharers_compute_anew(depth: int) -> None:
    harness = simulated(async_depth=depth)
    bad = harness.add(prompt(40), max_tokens=50)
    harness.turn(4)
    sharer = harness.add([*prompt(40), 3], max_tokens=30)
    harness.turn(2)
    assert hits(harness) > 0
    flag_row(harness, bad)
    harness.turn(2)
    request = harness.scheduler.requests.find((CLIENT, sharer))
    assert request is not None and request.preemptions == 1
    assert request.state in (State.PREEMPTED, State.RUNNING)
    harness.drain()
    assert len(harness.answers[sharer].tokens) == 30
    before = hits(harness)
    answer(harness, [*prompt(40), 3, 9])
    assert hits(harness) - before == 40, "the sharer's own recomputed blocks are published again"
    harness.assert_empty()
    harness.close()


def test_recomputed_tokens_are_counted_apart_and_are_no_hit() -> None:
    harness = simulated(num_gpu_blocks_override=26, max_num_seqs=4)
    numbers = [harness.add(prompt(length, length), max_tokens=50) for length in (8, 40, 16)]
    harness.drain()
    assert harness.mailbox.load.preemptions > 0
    assert hits(harness) == 0
    assert harness.mailbox.load.prefix_queries == 64
    assert harness.mailbox.load.recomputed_tokens > 0
    assert all(len(harness.answers[n].tokens) == 50 for n in numbers)
    harness.close()


def test_under_priority_the_highest_number_waits_and_yields() -> None:
    harness = simulated(scheduling_policy="priority", num_gpu_blocks_override=30, max_num_seqs=2)
    low = [harness.add(prompt(20, i), max_tokens=40, priority=5) for i in range(2)]
    late = harness.add(prompt(20, 9), max_tokens=20, priority=1)
    third = harness.add(prompt(20, 8), max_tokens=20, priority=3)
    order = []
    while not harness.scheduler.requests.idle or harness.mailbox.inbox:
        harness.turn()
        order += [n for n in (late, third, *low) if n in harness.answers and n not in order]
    assert order[:2] == [late, third]
    harness.drain()
    harness.assert_empty()
    harness.close()
