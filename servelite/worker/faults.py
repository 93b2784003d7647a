"""Faults on purpose, for tests (`--fault-injection`, with --debug only): a rank that fails as it is told.

    crash:token=77          the process aborts in a step with a request whose prompt holds token 77
    hang:step=12,rank=1     step 12 of the engine's first life does not end on rank 1

A fault at a step strikes in the first life only; one at a token strikes in every life. Rank 0, where none is
named, is with one rank the engine itself.
"""

from __future__ import annotations

import enum
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from servelite.config import SettingError
from servelite.ipc.messages import FLAG, FromRank, Plan, RowFlag, StepResult, pack, unpack
from servelite.kernels.collective import Collective
from servelite.worker.base import ModelRunner, StepFailedError

if TYPE_CHECKING:  # the simulated runner has none
    from torch import Tensor

DELAY_S: Final = 1.0


class FaultKind(enum.StrEnum):
    """What happens. The first four strike before the step is computed: the other ranks are in it then."""

    CRASH = "crash"  # SIGABRT, as a failed assertion in native code
    EXIT = "exit"  # the process ends without a word
    ERROR = "error"  # an exception that nobody expects
    HANG = "hang"  # the step does not end
    COLLECTIVE = "collective"  # the ranks' first operation of the step fails (--tp 2 or more)
    FAIL = "fail"  # no memory for the step
    NAN = "nan"  # the logits of the row (of every row, at a step) are not finite, whatever the rank
    DELAY = "delay"  # what the step sampled is told a second late
    DROP = "drop"  # it is never told (--tp 2 or more)


_OF_GROUPS: Final = (FaultKind.COLLECTIVE, FaultKind.DROP)
_FAULT: Final = re.compile(r"([a-z]+):(step|token)=([0-9]{1,9})(?:,rank=([0-9]{1,9}))?")


@dataclass(frozen=True)
class Fault:
    """When it happens: at a step, or whenever a prompt holds a token."""

    kind: FaultKind
    step: int = -1
    token: int = -1
    rank: int = 0


def parse_faults(text: str, ranks: int = 1) -> tuple[Fault, ...]:
    """The faults of `--fault-injection`.

    Raises:
        SettingError: it cannot be read, or does not go with so many ranks.
    """
    faults = []
    for part in filter(None, text.split(";")):
        found = _FAULT.fullmatch(part)
        if found is None or found[1] not in list(FaultKind):
            kinds = ", ".join(FaultKind)
            raise SettingError(
                f"--fault-injection: {part!r} is not one of {kinds} with :step=N or :token=ID behind it, "
                "and ,rank=R behind that where it is not for rank 0"
            )
        if found[2] == "step" and not int(found[3]):
            raise SettingError(f"--fault-injection: {part!r} can never happen: steps are counted from 1")
        kind, rank = FaultKind(found[1]), int(found[4] or 0)
        if rank >= ranks:
            raise SettingError(
                f"--fault-injection: {part!r} is for rank {rank}; --tp is {ranks}, from rank 0"
            )
        if kind in _OF_GROUPS and ranks == 1:
            raise SettingError(f"--fault-injection: {part!r} needs ranks that talk to each other: --tp 2")
        faults.append(Fault(kind, rank=rank, **{found[2]: int(found[3])}))
    return tuple(faults)


class Faults:
    """The faults of one rank in one life of its engine; wraps what they strike, and nothing where none is."""

    def __init__(self, faults: tuple[Fault, ...], rank: int, epoch: int) -> None:
        """`faults`: every rank's."""
        here = [fault for fault in faults if fault.rank == rank or fault.kind is FaultKind.NAN]
        # The rows that each is for, by the requests in them.
        self._rows: dict[Fault, set[int]] = {fault: set() for fault in here if fault.step < 0 or epoch == 0}
        self._plan: Plan | None = None  # of the step under way

    def group(self, group: Collective) -> Collective:
        """`group`, or one that fails."""
        return _FaultyCollective(group, self) if self._rows else group

    def runner(self, runner: ModelRunner) -> ModelRunner:
        """`runner`, or one that fails."""
        return _FaultyRunner(runner, self) if self._rows else runner

    def sender(self, send: Callable[[FromRank], None]) -> Callable[[FromRank], None]:
        """`send`, or one that loses messages."""

        def send_most(message: FromRank) -> None:
            if not self.striking(FaultKind.DROP):
                send(message)

        return send_most if self._rows else send

    def begin(self, plan: Plan) -> None:
        """A step is under way."""
        self._plan = plan
        for new in plan.new_rows:
            prompt = unpack(new.tokens)[: new.prompt_len]
            for fault, rows in self._rows.items():
                rows.discard(new.row)
                if fault.token in prompt:
                    rows.add(new.row)

    def striking(self, *kinds: FaultKind) -> list[Fault]:
        """Those of the kinds that strike in the step under way."""
        return [fault for fault in self._rows if fault.kind in kinds and self._strikes(fault)]

    def rows_of(self, fault: Fault) -> set[int] | None:
        """The rows it is for; None: all."""
        return None if fault.token < 0 else self._rows[fault]

    def _strikes(self, fault: Fault) -> bool:
        if self._plan is None:
            return False
        if fault.token < 0:
            return self._plan.step == fault.step
        return not self._rows[fault].isdisjoint(unpack(self._plan.rows).tolist())


class _FaultyRunner:
    """A `ModelRunner` around another one."""

    def __init__(self, runner: ModelRunner, faults: Faults) -> None:
        self._runner, self._faults, self.facts = runner, faults, runner.facts

    def watch(self, beat: Callable[[], None]) -> None:
        self._runner.watch(beat)

    def forward(self, plan: Plan) -> None:
        self._faults.begin(plan)
        for fault in self._faults.striking(*_BEFORE):
            _BEFORE[fault.kind]()
        self._runner.forward(plan)
        if self._faults.striking(FaultKind.FAIL):
            raise StepFailedError("a failed allocation that was asked for")

    def sample(self, plan: Plan, masks: bytes | None) -> StepResult:
        result = self._runner.sample(plan, masks)
        if self._faults.striking(FaultKind.DELAY):
            time.sleep(DELAY_S)
        flags = unpack(result.flags, FLAG).copy()
        for fault in self._faults.striking(FaultKind.NAN):
            marked = self._faults.rows_of(fault)
            hit = [marked is None or row in marked for row in unpack(result.rows).tolist()]
            flags[np.asarray(hit, bool)] = RowFlag.NON_FINITE
        return msgspec.structs.replace(result, flags=pack(flags, FLAG))


class _FaultyCollective:
    """A `Collective` around another one."""

    def __init__(self, group: Collective, faults: Faults) -> None:
        self._group, self._faults = group, faults
        self.rank, self.size = group.rank, group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        self._strike()
        return self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self._strike()
        return self._group.all_gather(x)

    def barrier(self) -> None:
        self._strike()
        self._group.barrier()

    def _strike(self) -> None:
        if self._faults.striking(FaultKind.COLLECTIVE):
            raise RuntimeError("a failed collective that was asked for")


def _error() -> None:
    raise RuntimeError("a fault that was asked for")


def _hang() -> None:
    while True:
        signal.pause()


_BEFORE: Final[dict[FaultKind, Callable[[], None]]] = {
    FaultKind.CRASH: os.abort,
    FaultKind.EXIT: partial(os._exit, 3),
    FaultKind.ERROR: _error,
    FaultKind.HANG: _hang,
}
