"""The interface between the engine core and whatever runs the steps."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from servelite.ipc.messages import Plan, StepResult
from servelite.worker.base import RunnerFacts


@dataclass
class InFlight:
    """A submitted step."""

    plan: Plan
    computed: Future[None]
    sampled: Future[StepResult] = field(default_factory=Future)

    def result(self) -> StepResult:
        """Wait for the step and return it; raises what the runner raised."""
        return self.sampled.result()


class Executor(Protocol):
    """Takes plans in order; at most `async_depth` steps are in flight."""

    @property
    def facts(self) -> RunnerFacts: ...

    def forward(self, plan: Plan) -> InFlight:
        """Submit the forward pass of a step."""
        ...

    def sample(self, step: InFlight, masks: bytes | None) -> None:
        """Submit the sampling of the step that was submitted last."""
        ...

    def close(self) -> None:
        """Free what it holds; idempotent."""
        ...
