"""A runner in the engine core's own process: one rank, no second process to pay for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from servelite.executor.base import InFlight
from servelite.ipc.messages import Plan, StepResult
from servelite.worker.base import ModelRunner

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class _Step:
    """Fulfils `InFlight`."""

    plan: Plan
    computed: Future[None]
    sampled: Future[StepResult] = field(default_factory=Future)

    def result(self) -> StepResult:
        return self.sampled.result()


class InProcessExecutor:
    """An `Executor` that runs steps on the calling thread at depth 1, and on one of its own at more.

    One thread either way: steps run in order, and OpenMP has one team.
    """

    def __init__(self, runner: ModelRunner, depth: int) -> None:
        self._runner, self.facts = runner, runner.facts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model-runner") if depth > 1 else None

    def forward(self, plan: Plan) -> InFlight:
        return _Step(plan, self._submit(self._runner.forward, plan))

    def sample(self, step: InFlight, masks: bytes | None) -> None:
        assert isinstance(step, _Step)
        step.sampled = self._submit(self._sample, step, masks)

    def _sample(self, step: _Step, masks: bytes | None) -> StepResult:
        step.computed.result()
        return self._runner.sample(step.plan, masks)

    def _submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._thread is not None:
            return self._thread.submit(call, *args, **kwargs)
        done: Future[T] = Future()
        try:
            done.set_result(call(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
