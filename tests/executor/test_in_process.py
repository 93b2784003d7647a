"""The in-process executor: order, threads, and errors, at depth 1 and more."""

from __future__ import annotations

import threading

import pytest

from servelite.executor.in_process import InProcessExecutor
from servelite.ipc.messages import Plan, RunnerFacts, StepResult

FACTS = RunnerFacts(1, 1, 1, 1, (), "none", "none")


class Recorder:
    facts = FACTS

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str]] = []

    def forward(self, plan: Plan) -> None:
        self.calls.append(("forward", plan.step, threading.current_thread().name))
        if plan.step == 13:
            raise ValueError("unlucky")

    def sample(self, plan: Plan, masks: bytes | None) -> StepResult:
        self.calls.append(("sample", plan.step, threading.current_thread().name))
        return StepResult(plan.epoch, plan.step, b"", b"", b"", b"", b"")


def a_plan(step: int) -> Plan:
    return Plan(1, step, b"", b"", b"", b"", b"", b"", b"")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_run_in_order_on_one_thread(depth: int) -> None:
    runner = Recorder()
    executor = InProcessExecutor(runner, depth)
    steps = []
    for number in range(1, 6):
        steps.append(executor.forward(a_plan(number)))
        executor.sample(steps[-1], None)
    assert [step.result().step for step in steps] == [1, 2, 3, 4, 5]
    assert [(kind, step) for kind, step, _ in runner.calls] == [
        (kind, step) for step in range(1, 6) for kind in ("forward", "sample")
    ]
    threads = {thread for _, _, thread in runner.calls}
    assert len(threads) == 1
    assert (threading.current_thread().name in threads) == (depth == 1)
    executor.close()
    executor.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_what_forward_raises_comes_out_of_the_result_and_nothing_is_sampled(depth: int) -> None:
    runner = Recorder()
    executor = InProcessExecutor(runner, depth)
    step = executor.forward(a_plan(13))
    executor.sample(step, None)
    with pytest.raises(ValueError, match="unlucky"):
        step.result()
    assert [kind for kind, _, _ in runner.calls] == ["forward"]
    executor.close()
