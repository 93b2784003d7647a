"""The interface of a model runner, real or simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from servelite.ipc.messages import Plan, RunnerFacts, StepResult


class ModelRunner(Protocol):
    """Runs one step in two calls, so that masks can be made while the forward pass runs.

    Calls come in pairs (forward, then sample for the same plan), from one thread, steps
    consecutive. A runner holds derived state only: what it knows of a request came in
    `Plan.new_rows`, and a fresh runner is empty.
    """

    @property
    def facts(self) -> RunnerFacts: ...

    def watch(self, beat: Callable[[], None]) -> None:
        """Call `beat` every so often while a step is computed: from now on, and from whatever thread."""

    def forward(self, plan: Plan) -> None:
        """Compute the plan's tokens and keep what `sample` needs.

        Raises:
            StepGapError: `plan.step` does not follow the last one.
            StepFailedError: nothing was computed, and the runner can go on.
        """

    def sample(self, plan: Plan, masks: bytes | None) -> StepResult:
        """Draw a token for each row with logits; the token also lands in the resident table.

        Args:
            masks: a frame of `ipc.masks`, of those sampling rows that a grammar binds; None where the
                plan needs none.
        """


class StepFailedError(RuntimeError):
    """A step gave nothing, and the runner can go on: out of memory for its intermediates, say.

    What the step (and any after it in flight) wrote into KV blocks is void; each of its rows comes
    again in a `NewRow` before it is planned again.
    """


class StepGapError(RuntimeError):
    """A worker was given a step that does not follow the one before: ranks would diverge."""
