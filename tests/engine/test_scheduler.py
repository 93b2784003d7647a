"""The scheduler over the simulated runner: budget, chunks, blocks, preemption, queue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from servelite.engine.outbox import Outbox
from servelite.ipc.messages import FinishReason, Load, Plan, TokenLogprobs, unpack
from servelite.ipc.states import State
from servelite.worker.base import StepFailedError
from tests.engine_harness import CLIENT, Harness, prompt, simulated


def watch_plans(harness: Harness) -> list[Plan]:
    """All plans the harness's engine makes from now on."""
    plans: list[Plan] = []
    forward = harness.executor.forward
    harness.executor.forward = lambda plan: (plans.append(plan), forward(plan))[1]  # type: ignore[method-assign]
    return plans


def alone(request: dict, **settings: object) -> list[int]:
    harness = simulated(**settings)
    number = harness.add(**request)
    harness.drain()
    harness.close()
    return harness.answers[number].tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_answer_has_max_tokens_and_leaves_nothing(depth: int) -> None:
    harness = simulated(async_depth=depth)
    number = harness.add(prompt(10), max_tokens=7)
    harness.drain()
    assert len(harness.answers[number].tokens) == 7
    assert harness.answers[number].finish is FinishReason.LENGTH
    harness.assert_empty()
    harness.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_no_step_computes_past_the_last_token(depth: int, max_tokens: int) -> None:
    harness = simulated(async_depth=depth)
    plans = watch_plans(harness)
    harness.add(prompt(10), max_tokens=max_tokens)
    harness.drain()
    assert sum(unpack(plan.num_tokens).sum() for plan in plans) == 10 + max_tokens - 1
    harness.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_token_ends_the_answer_and_is_its_last(depth: int) -> None:
    tokens = alone({"prompt": prompt(9), "max_tokens": 20, "seed": 3})
    stop = tokens[5]
    at = tokens.index(stop)
    harness = simulated(async_depth=depth)
    number = harness.add(prompt(9), max_tokens=20, seed=3, stop_token_ids=(stop,))
    other = harness.add(prompt(9), max_tokens=20, seed=3, stop_token_ids=(*range(1000, 1020), stop))
    harness.drain()
    for answer in (harness.answers[number], harness.answers[other]):
        assert answer.tokens == tokens[: at + 1]
        assert answer.finish is FinishReason.STOP
    harness.assert_empty()
    harness.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [8, 16, 64])
@pytest.mark.parametrize("groups", [1, 2])
def test_tokens_do_not_depend_on_batch_chunks_or_depth(depth: int, budget: int, groups: int) -> None:
    requests = [{"prompt": prompt(3 + 7 * i, i), "max_tokens": 5 + i, "seed": i} for i in range(8)]
    expected = [alone(request, groups=groups) for request in requests]
    harness = simulated(async_depth=depth, max_num_batched_tokens=budget, groups=groups)
    numbers = [harness.add(**request) for request in requests]
    harness.drain()
    assert [harness.answers[n].tokens for n in numbers] == expected
    harness.assert_empty()
    harness.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_survive_preemption(depth: int) -> None:
    requests = [{"prompt": prompt(20 + i, i), "max_tokens": 40, "seed": i} for i in range(6)]
    expected = [alone(request) for request in requests]
    harness = simulated(async_depth=depth, num_gpu_blocks_override=30)
    numbers = [harness.add(**request) for request in requests]
    harness.drain()
    assert harness.mailbox.load.preemptions > 0
    assert [harness.answers[n].tokens for n in numbers] == expected
    harness.assert_empty()
    harness.close()


def test_the_budget_is_never_exceeded_and_decodes_never_wait() -> None:
    harness = simulated(max_num_batched_tokens=16)
    plans = watch_plans(harness)
    first = harness.add(prompt(4), max_tokens=30)
    harness.turn()
    for i in range(4):
        harness.add(prompt(50, i), max_tokens=4)
    harness.drain()
    row = 0
    for plan in plans:
        counts = dict(zip(unpack(plan.rows).tolist(), unpack(plan.num_tokens).tolist(), strict=True))
        assert sum(counts.values()) <= 16
    decodes = [p for p in plans[1:30] if row in unpack(p.rows)]
    assert len(decodes) == 29, "the running answer got a token at every step"
    assert len(harness.answers[first].tokens) == 30
    harness.close()


def test_a_short_prompt_behind_a_long_one_starts_within_three_steps() -> None:
    harness = simulated(max_model_len=4096, max_num_batched_tokens=64)
    harness.add(prompt(4000), max_tokens=4)
    harness.turn()
    short = harness.add(prompt(10), max_tokens=4)
    harness.turn(3)
    assert harness.answers[short].tokens
    harness.close()


def test_the_victim_is_the_one_that_costs_least_and_never_the_first() -> None:
    harness = simulated(num_gpu_blocks_override=26, max_num_seqs=4)
    numbers = [harness.add(prompt(length, length), max_tokens=60) for length in (8, 40, 16)]
    while harness.mailbox.load.preemptions == 0:
        harness.turn()
    states = [harness.scheduler.requests.find((CLIENT, number)).state for number in numbers]
    assert states == [State.RUNNING, State.RUNNING, State.PREEMPTED]
    harness.drain()
    harness.assert_empty()
    harness.close()


def test_admission_leaves_a_watermark_free() -> None:
    harness = simulated(
        num_gpu_blocks_override=201, max_num_batched_tokens=1000, max_model_len=800, max_num_seqs=4
    )
    harness.add(prompt(780), max_tokens=4)  # 195 of 201 blocks, 196 from the next step on
    harness.turn()
    harness.add(prompt(12, 1), max_tokens=4)  # 3 blocks, which leaves the reserve of 2
    harness.add(prompt(4, 2), max_tokens=4)  # 1 block of the reserve
    harness.turn()
    assert harness.mailbox.load.running == 2
    assert harness.mailbox.load.waiting == 1
    harness.drain()
    harness.assert_empty()
    harness.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_blocks_of_an_aborted_request_are_back_within_depth_plus_one_steps(depth: int) -> None:
    harness = simulated(async_depth=depth)
    keep = harness.add(prompt(8), max_tokens=100)
    gone = harness.add(prompt(33), max_tokens=100)
    harness.turn(5)
    before = harness.mailbox.load.steps
    held = harness.scheduler.kv.held(harness.scheduler.requests.find((CLIENT, gone)).row)
    free = harness.scheduler.kv.num_free
    harness.abort(gone)
    while harness.scheduler.requests.find((CLIENT, gone)) is not None:
        harness.turn()
    assert harness.scheduler.requests.totals.steps - before <= depth + 1
    assert harness.scheduler.kv.num_free >= free + held - 2
    assert not harness.answers[gone].finish
    harness.abort(gone, keep, keep, 12345)
    harness.drain()
    harness.assert_empty()
    harness.close()


def test_choices_wait_for_the_first_ones_prompt() -> None:
    harness = simulated(max_num_batched_tokens=16)
    leader = harness.add(prompt(40), max_tokens=4)
    follower = harness.add(prompt(40), max_tokens=4, prefix_of=leader, choice=1, seed=leader)
    harness.turn(2)
    assert harness.scheduler.requests.find((CLIENT, follower)).state is State.PARKED
    assert harness.mailbox.load.waiting == 1
    while not harness.answers.get(leader):
        harness.turn()
    assert harness.scheduler.requests.find((CLIENT, follower)).state is not State.PARKED
    harness.drain()
    assert len(harness.answers[follower].tokens) == 4
    assert harness.answers[follower].tokens != harness.answers[leader].tokens
    harness.assert_empty()
    harness.close()


def test_a_follower_goes_on_when_its_leader_is_aborted() -> None:
    harness = simulated()
    leader = harness.add(prompt(100), max_tokens=4)
    follower = harness.add(prompt(100), max_tokens=4, prefix_of=leader)
    harness.turn()
    harness.abort(leader)
    harness.drain()
    assert len(harness.answers[follower].tokens) == 4
    harness.assert_empty()
    harness.close()


def test_a_follower_does_not_wait_for_a_leader_that_is_over_but_in_flight() -> None:
    harness = simulated(async_depth=3)
    leader = harness.add(prompt(100), max_tokens=4)
    harness.turn()
    harness.abort(leader)
    follower = harness.add(prompt(100), max_tokens=4, prefix_of=leader)
    harness.core._take_messages(block=False)
    assert harness.scheduler.requests.find((CLIENT, leader)).state is State.FINISHING
    harness.drain()
    assert len(harness.answers[follower].tokens) == 4
    harness.assert_empty()
    harness.close()


def test_the_queue_is_bounded_in_requests_and_in_tokens() -> None:
    harness = simulated(max_num_seqs=1, max_waiting_requests=3)
    numbers = [harness.add(prompt(8, i), max_tokens=2) for i in range(10)]
    harness.drain()
    codes = [harness.answers[n].error.code if harness.answers[n].error else "" for n in numbers]
    assert codes == [""] * 4 + ["queue_full"] * 6
    harness.close()
    harness = simulated(max_num_seqs=1, max_waiting_tokens=100)
    numbers = [harness.add(prompt(60, i), max_tokens=2) for i in range(3)]
    harness.drain()
    assert [harness.answers[n].error is not None for n in numbers] == [False, True, True]
    harness.close()


def test_choices_that_share_a_prompt_wait_as_one() -> None:
    """Whatever the bound in tokens: the prompt is counted once, and it is the first in the queue."""
    harness = simulated(max_num_seqs=4, max_waiting_tokens=50)
    leader = harness.add(prompt(100), max_tokens=2)
    numbers = [leader, *(harness.add(prompt(100), max_tokens=2, prefix_of=leader) for _ in range(3))]
    harness.drain()
    assert [harness.answers[n].error for n in numbers] == [None] * 4
    harness.close()


@pytest.mark.parametrize(
    ("request_fields", "code", "text"),
    [
        ({"prompt": []}, "invalid_prompt", "no tokens"),
        ({"prompt": [1, 1000]}, "invalid_prompt", "1000"),
        ({"prompt": [-1]}, "invalid_prompt", "-1"),
        ({"prompt": [1], "max_tokens": 0}, "invalid_max_tokens", "0"),
        ({"prompt": prompt(250), "max_tokens": 7}, "context_length_exceeded", "256"),
        ({"prompt": [1], "logprobs": 2}, "unsupported", "logprobs"),
        ({"prompt": [1], "prompt_logprobs": 0}, "unsupported", "prompt_logprobs"),
        ({"prompt": [1] * 9, "block_hashes": b"short"}, "invalid_prompt", "hashes"),
        ({"prompt": [1], "grammar": "x"}, "unsupported", "grammar"),
        ({"prompt": [1], "produced": [5] * 8}, "invalid_max_tokens", "8"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_numbers(
    request_fields: dict, code: str, text: str
) -> None:
    harness = simulated()
    number = harness.add(**request_fields)
    fine = harness.add(prompt(4), max_tokens=2)
    harness.drain()
    error = harness.answers[number].error
    assert error is not None and error.code == code and text in error.message
    assert len(harness.answers[fine].tokens) == 2
    harness.assert_empty()
    harness.close()


def test_a_request_larger_than_the_whole_cache_is_refused() -> None:
    harness = simulated(num_gpu_blocks_override=10)
    number = harness.add(prompt(38), max_tokens=4)
    fits = harness.add(prompt(37), max_tokens=4)
    harness.drain()
    assert harness.answers[number].error.code == "context_length_exceeded"
    assert "11 KV blocks" in harness.answers[number].error.message
    assert len(harness.answers[fits].tokens) == 4
    harness.close()


def test_the_progress_page_names_what_is_in_flight() -> None:
    harness = simulated(async_depth=2)
    a, b = harness.add(prompt(4), max_tokens=9), harness.add(prompt(5), max_tokens=9)
    harness.turn()
    (mark,) = harness.page.steps_in_flight()
    assert (mark.epoch, mark.step) == (1, 1)
    assert set(mark.requests) == {(CLIENT, a), (CLIENT, b)}
    harness.drain()
    assert harness.page.steps_in_flight() == []
    harness.close()


def test_an_idle_engine_blocks_and_a_busy_one_does_not() -> None:
    harness = simulated()
    harness.turn()
    harness.add(prompt(4), max_tokens=3)
    harness.turn(2)
    assert harness.mailbox.waits == [None, None, 0.0]
    harness.drain()
    harness.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_step_costs_time_and_no_tokens(depth: int) -> None:
    requests = [{"prompt": prompt(20 + i, i), "max_tokens": 12, "seed": i} for i in range(4)]
    expected = [alone(request) for request in requests]
    harness = simulated(async_depth=depth)
    numbers = [harness.add(**request) for request in requests]
    fail_steps(harness, {2, 7, 8})
    harness.drain()
    assert [harness.answers[n].tokens for n in numbers] == expected
    assert harness.mailbox.load.preemptions >= 4
    harness.assert_empty()
    harness.close()


def test_a_request_whose_steps_keep_failing_is_given_up_and_the_engine_goes_on() -> None:
    harness = simulated()
    number = harness.add(prompt(20), max_tokens=12)
    fail_steps(harness, {3, 4, 5})
    harness.drain()
    error = harness.answers[number].error
    assert error is not None and (error.status, error.code) == (500, "step_failed")
    fine = harness.add(prompt(20), max_tokens=3)
    harness.drain()
    assert len(harness.answers[fine].tokens) == 3
    harness.assert_empty()
    harness.close()


def fail_steps(harness: Harness, steps: set[int]) -> None:
    """These steps raise after they wrote what they would have written."""
    runner = harness.executor._runner
    forward = runner.forward

    def failing(plan: Plan) -> None:
        forward(plan)
        if plan.step in steps:
            raise StepFailedError("a fault of the test's")

    runner.forward = failing  # type: ignore[method-assign]


def test_logprobs_of_two_steps_published_at_once_follow_one_another() -> None:
    outbox, load = Outbox(), Load()
    for index in (3, 4):
        outbox.add_logprobs(CLIENT, 7, TokenLogprobs(index, 1, bytes([index]) * 4, b"", b""))
    outbox.add_prompt_logprobs(CLIENT, 7, TokenLogprobs(1, 0, b"abcd", b"", b""))
    outputs = outbox.take(1, load)[CLIENT]
    assert outputs.logprobs == {7: TokenLogprobs(3, 1, b"\3\3\3\3\4\4\4\4", b"", b"")}
    assert outputs.prompt_logprobs[7].chosen == b"abcd"
    assert outbox.take(2, load) == {}


def test_prompt_logprobs_ask_for_logits_of_every_chunk_and_skip_the_cache() -> None:
    harness = simulated(max_num_batched_tokens=16)
    harness.core._admission = replace(harness.core._admission, features=("logprobs",))
    harness.add(prompt(40), max_tokens=2)
    harness.drain()
    plans = watch_plans(harness)
    harness.add(prompt(40), max_tokens=3, prompt_logprobs=0)
    harness.drain()
    assert [unpack(p.num_logits).tolist() for p in plans] == [[16], [16], [8], [1], [1]]
    assert harness.scheduler.requests.totals.prefix_hits == 0
    harness.assert_empty()
    harness.close()


def test_an_error_of_a_step_after_a_failed_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    request = {"prompt": prompt(20), "max_tokens": 12, "seed": 1}
    expected = alone(request)
    harness = simulated(async_depth=3)
    number = harness.add(**request)
    runner = harness.executor._runner
    forward = runner.forward

    def failing(plan: Plan) -> None:
        forward(plan)
        if plan.step == 3:
            raise StepFailedError("a fault of the test's")
        if plan.step == 4:
            raise ValueError("what came of it")

    runner.forward = failing  # type: ignore[method-assign]
    harness.drain()
    assert harness.answers[number].tokens == expected
    assert "what came of it" in caplog.text
    harness.assert_empty()
    harness.close()
