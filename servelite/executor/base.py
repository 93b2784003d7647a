"""The interface between the engine core and whatever runs the steps."""

from __future__ import annotations

from typing import Protocol

from servelite.ipc.messages import Plan, RunnerFacts, StepResult


class InFlight(Protocol):
    """A submitted step."""

    @property
    def plan(self) -> Plan: ...

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled. Called once a step, in the order of the steps.

        Raises:
            StepFailedError: the step gave nothing, and the executor can go on.
        """


class Executor(Protocol):
    """Takes plans in order; at most `async_depth` steps are in flight."""

    @property
    def facts(self) -> RunnerFacts: ...

    def forward(self, plan: Plan) -> InFlight:
        """Submit the forward pass of a step. What it raises, the step's `result` raises."""

    def sample(self, step: InFlight, masks: bytes | None) -> None:
        """Submit the sampling of the step that was submitted last."""

    def close(self) -> None:
        """Free what it holds; idempotent."""
