"""Runners in processes of their own, one a tensor-parallel rank, in lockstep on one plan.

Nothing is tried again here: a rank that cannot run a step ends with its error, and the launcher ends the
others and the engine, and starts anew.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from servelite.executor.base import InFlight
from servelite.ipc.messages import FromRank, Plan, RankDone, RankGroup, RankReady, RunnerFacts, StepResult
from servelite.ipc.rank_group import EngineEnd


class RanksDivergedError(RuntimeError):
    """The ranks of a group do not say the same: what they hold can be trusted no more."""


@dataclass
class _Step:
    """Fulfils `InFlight`."""

    plan: Plan
    executor: MultiProcessExecutor

    def result(self) -> StepResult:
        return self.executor._result(self.plan)


class MultiProcessExecutor:
    """Writes each plan once, for all ranks, and reads what each makes of it: from rank 0 the result, from
    the others that they have sampled the same.
    """

    def __init__(self, group: RankGroup) -> None:
        self._ranks = range(group.size)
        self._end = EngineEnd(group)

    @cached_property
    def facts(self) -> RunnerFacts:
        """All ranks', without a ledger; waits until each has loaded its part of the model.

        Raises:
            RanksDivergedError: they differ.
        """
        first, *others = (self._facts_of(rank) for rank in self._ranks)
        for rank, facts in enumerate(others, 1):
            for name, value in vars(facts).items():
                if value != getattr(first, name):
                    raise RanksDivergedError(
                        f"rank {rank} has {name} {value!r}, rank 0 has {getattr(first, name)!r}"
                    )
        return first

    def _facts_of(self, rank: int) -> RunnerFacts:
        message = self._end.recv(rank)
        if not isinstance(message, RankReady):
            raise RanksDivergedError(f"rank {rank} began with {_named(message)}")
        return dataclasses.replace(message.facts, ledger=())

    def forward(self, plan: Plan) -> InFlight:
        """See `Executor.forward`."""
        self._end.send_plan(plan)
        return _Step(plan, self)

    def sample(self, step: InFlight, masks: bytes | None) -> None:
        """See `Executor.sample`. Ranks sample unasked where the plan needs no masks."""
        if step.plan.needs_masks:
            assert masks is not None, "the plan needs masks"
            self._end.send_masks(masks)

    def _result(self, plan: Plan) -> StepResult:
        """What the ranks say of the step.

        Raises:
            RanksDivergedError: they say different things, or speak of another step.
        """
        result = self._end.recv(0)
        if not isinstance(result, StepResult) or (result.epoch, result.step) != (plan.epoch, plan.step):
            raise RanksDivergedError(f"rank 0 answered step {plan.step} with {_named(result)}")
        done = RankDone(plan.epoch, plan.step, result.checksum)
        for rank in self._ranks[1:]:
            if (message := self._end.recv(rank)) != done:
                raise RanksDivergedError(
                    f"rank {rank} answered step {plan.step} with {_named(message)}, not {_named(done)}"
                )
        return result

    def close(self) -> None:
        """See `Executor.close`. The ranks are the launcher's to end."""
        self._end.close()


def _named(message: FromRank) -> str:
    """A message in an error, without its columns."""
    if isinstance(message, RankReady):
        return "RankReady"
    return (
        f"{type(message).__name__}(step {message.step}, epoch {message.epoch}, tokens {message.checksum:08x})"
    )
