"""Requests that end with their prompt, and a vector: scheduled, cached, preempted and ended as others are."""

from __future__ import annotations

from typing import Any

import pytest

from servelite.ipc.messages import FinishReason, Kind, Plan, unpack
from servelite.worker.base import ModelRunner, StepFailedError
from servelite.worker.faults import Faults, parse_faults
from tests.engine_harness import Harness, prompt, simulated

BATCH = {"max_num_seqs": 32, "max_num_batched_tokens": 512}


def pool(engine: Harness, tokens: list[int], **fields: Any) -> int:
    return engine.add(tokens, max_tokens=1, temperature=0.0, kind=Kind.POOL, **fields)


def alone(tokens: list[int]) -> bytes:
    """The vector of a prompt that has the engine for itself."""
    engine = simulated(pooling="last", max_num_batched_tokens=512)
    number = pool(engine, tokens)
    engine.drain()
    return engine.answers[number].vector


class Recording:
    """A runner that keeps the plans it is given."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.plans: list[Plan] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, plan: Plan) -> None:
        self.plans.append(plan)
        self._runner.forward(plan)


class FailingOnce(Recording):
    """A runner whose second step fails."""

    def forward(self, plan: Plan) -> None:
        super().forward(plan)
        if plan.step == 2:
            raise StepFailedError("out of memory")


def test_a_vector_ends_the_request_without_a_token() -> None:
    engine = simulated(pooling="last")
    number = pool(engine, prompt(150))
    engine.drain()
    answer = engine.answers[number]
    assert (answer.tokens, answer.finish, len(answer.vector)) == ([], FinishReason.STOP, 16)
    assert engine.mailbox.load.steps == 3 and engine.mailbox.load.scheduled_tokens == 150
    engine.assert_empty()


def test_a_batch_runs_together() -> None:
    engine = simulated(pooling="mean", **BATCH)
    prompts = [prompt(8 + i % 5, salt=i) for i in range(32)]
    numbers = [pool(engine, tokens) for tokens in prompts]
    engine.drain()
    assert engine.mailbox.load.steps == 1
    assert [engine.answers[number].vector for number in numbers] == [alone(tokens) for tokens in prompts]


@pytest.mark.parametrize("kind", ["mean", "last"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_whatever_happens_around_it_the_vector_is_the_same(kind: str, depth: int) -> None:
    """Among generating requests, in chunks, with so few blocks that all but one are preempted by turns."""
    engine = simulated(pooling=kind, async_depth=depth, num_gpu_blocks_override=70, max_num_batched_tokens=24)
    shared = prompt(60)
    prompts = [[*shared[: 10 * i], *prompt(30 + i, salt=i)] for i in range(7)]
    numbers = []
    for tokens in prompts:
        engine.add(tokens, max_tokens=40)
        numbers.append(pool(engine, tokens))
        engine.turn(2)
    engine.drain()
    assert engine.mailbox.load.preemptions > 0
    assert [engine.answers[number].vector for number in numbers] == [alone(tokens) for tokens in prompts]
    engine.assert_empty()


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_only_the_last_position_can_begin_in_the_cache(kind: str) -> None:
    engine = simulated(pooling=kind)
    for _ in range(2):
        pool(engine, prompt(41))
        engine.drain()
    load = engine.mailbox.load
    assert load.prefix_hits == (40 if kind == "last" else 0)
    # What it computes is as good for others as anybody's.
    engine.add(prompt(41), max_tokens=2)
    engine.drain()
    assert engine.mailbox.load.prefix_hits == load.prefix_hits + 40


def test_a_prompt_may_be_as_long_as_the_model() -> None:
    engine = simulated(pooling="last", max_model_len=100)
    longest, longer = pool(engine, prompt(100)), pool(engine, prompt(101))
    engine.drain()
    assert engine.answers[longest].vector
    error = engine.answers[longer].error
    assert error is not None and (error.status, error.code) == (400, "context_length_exceeded")
    assert "101 tokens" in error.message and "100" in error.message


def test_an_abort_frees_its_blocks() -> None:
    engine = simulated(pooling="last", async_depth=2)
    number = pool(engine, prompt(200))
    engine.turn()
    engine.abort(number)
    engine.turn(4)
    engine.assert_empty()
    assert number not in engine.answers


def test_a_deadline_that_passes_in_the_queue_ends_it() -> None:
    engine = simulated(pooling="last", max_num_seqs=1)
    pool(engine, prompt(200))
    late = pool(engine, prompt(9), deadline_ms=0)
    engine.drain()
    error = engine.answers[late].error
    assert error is not None and error.code == "deadline_exceeded"


@pytest.mark.parametrize("depth", [1, 3])
def test_a_failed_step_is_computed_again(depth: int) -> None:
    engine = simulated(pooling="mean", async_depth=depth, wrap=FailingOnce)
    prompts = [prompt(50 + i, salt=i) for i in range(4)]
    numbers = [pool(engine, tokens) for tokens in prompts]
    engine.drain()
    assert [engine.answers[number].vector for number in numbers] == [alone(tokens) for tokens in prompts]


def test_a_vector_that_is_not_finite_is_an_error_of_its_own() -> None:
    faults = Faults(parse_faults("nan:token=7"), 0, 0)
    engine = simulated(pooling="last", wrap=faults.runner)
    bad, good = pool(engine, [7, 8, 9]), pool(engine, [8, 9])
    engine.drain()
    error = engine.answers[bad].error
    assert error is not None and error.code == "non_finite_logits" and not engine.answers[bad].vector
    assert engine.answers[good].vector == alone([8, 9])
    assert engine.mailbox.load.corrupted == 1


@pytest.mark.parametrize(
    ("facts", "kind", "word"),
    [({"pooling": "mean", "encoder": True}, Kind.GENERATE, "generate"), ({}, Kind.POOL, "pool")],
)
def test_what_the_model_cannot_do_is_refused(facts: dict[str, Any], kind: Kind, word: str) -> None:
    engine = simulated(**facts)
    number = engine.add(prompt(5), max_tokens=1, kind=kind)
    engine.drain()
    error = engine.answers[number].error
    assert error is not None and error.status == 400 and word in error.message


@pytest.mark.parametrize("fields", [{"max_tokens": 2}, {"produced": [1]}, {"grammar": "x"}], ids=str)
def test_an_add_that_is_no_prompt_alone_is_refused(fields: dict[str, Any]) -> None:
    engine = simulated(pooling="last")
    number = engine.add(prompt(5), **({"max_tokens": 1} | fields), kind=Kind.POOL)
    engine.drain()
    error = engine.answers[number].error
    assert error is not None and error.status == 400


@pytest.mark.parametrize("depth", [1, 2])
def test_an_encoder_sees_each_prompt_whole(depth: int) -> None:
    made: list[Recording] = []
    engine = simulated(
        pooling="mean",
        encoder=True,
        async_depth=depth,
        max_model_len=64,
        wrap=lambda runner: made.append(Recording(runner)) or made[0],
    )
    lengths = [40, 30, 64, 1, 33, 20, 20, 20]
    numbers = [pool(engine, prompt(length, salt=i)) for i, length in enumerate(lengths)]
    engine.drain()
    assert [engine.answers[number].vector for number in numbers] == [
        alone(prompt(length, salt=i)) for i, length in enumerate(lengths)
    ]
    assert [unpack(plan.num_tokens).tolist() for plan in made[0].plans] == [
        [40],
        [30],
        [64],
        [1, 33, 20],
        [20, 20],
    ]
    assert engine.mailbox.load.prefix_hits == 0
    engine.assert_empty()
