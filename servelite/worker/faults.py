"""Faults on purpose, for tests (`--fault-injection`, with --debug only): a runner that fails as it is told.

    crash:token=77      the process aborts in a step with a request whose prompt holds token 77
    hang:step=12        step 12 of the engine's first life does not end

A fault at a step strikes in the first life only; one at a token strikes in every life.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from servelite.config import SettingError
from servelite.ipc.messages import FLAG, Plan, RowFlag, StepResult, pack, unpack
from servelite.worker.base import ModelRunner, RunnerFacts, StepFailedError


class FaultKind(enum.StrEnum):
    """What happens."""

    CRASH = "crash"  # SIGABRT, as a failed assertion in native code
    EXIT = "exit"  # the process ends without a word
    ERROR = "error"  # an exception that nobody expects
    HANG = "hang"  # the step does not end
    FAIL = "fail"  # no memory for the step
    NAN = "nan"  # the logits of the row (of every row, at a step) are not finite


@dataclass(frozen=True)
class Fault:
    """When it happens: at a step, or whenever a prompt holds a token."""

    kind: FaultKind
    step: int = -1
    token: int = -1


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults of `--fault-injection`.

    Raises:
        SettingError: it cannot be read.
    """
    faults = []
    for part in filter(None, text.split(";")):
        kind, _, when = part.partition(":")
        name, _, number = when.partition("=")
        if kind not in list(FaultKind) or name not in ("step", "token") or not number.isdigit():
            kinds = ", ".join(FaultKind)
            raise SettingError(
                f"--fault-injection: {part!r} is not one of {kinds} with :step=N or :token=ID behind it"
            )
        faults.append(Fault(FaultKind(kind), **{name: int(number)}))
    return tuple(faults)


class FaultyRunner:
    """A `ModelRunner` around another one."""

    def __init__(self, runner: ModelRunner, faults: tuple[Fault, ...], epoch: int) -> None:
        self._runner = runner
        self._faults = [fault for fault in faults if fault.step < 0 or epoch == 0]
        self._marked: dict[Fault, set[int]] = {fault: set() for fault in self._faults}  # rows

    @property
    def facts(self) -> RunnerFacts:
        """The runner's."""
        return self._runner.facts

    def watch(self, beat: Callable[[], None]) -> None:
        """See `ModelRunner.watch`."""
        self._runner.watch(beat)

    def forward(self, plan: Plan) -> None:
        """See `ModelRunner.forward`."""
        for new in plan.new_rows:
            prompt = unpack(new.tokens)[: new.prompt_len]
            for fault, rows in self._marked.items():
                rows.discard(new.row)
                if fault.token in prompt:
                    rows.add(new.row)
        self._runner.forward(plan)
        for fault in self._faults:
            if fault.kind is not FaultKind.NAN and self._struck(fault, plan):
                _HAPPENS[fault.kind]()

    def sample(self, plan: Plan, masks: bytes | None) -> StepResult:
        """See `ModelRunner.sample`."""
        result = self._runner.sample(plan, masks)
        flags = unpack(result.flags, FLAG).copy()
        for fault in self._faults:
            if fault.kind is FaultKind.NAN and self._struck(fault, plan):
                hit = [fault.token < 0 or row in self._marked[fault] for row in unpack(result.rows).tolist()]
                flags[np.asarray(hit, bool)] = RowFlag.NON_FINITE
        return msgspec.structs.replace(result, flags=pack(flags, FLAG))

    def _struck(self, fault: Fault, plan: Plan) -> bool:
        if fault.token < 0:
            return plan.step == fault.step
        return not self._marked[fault].isdisjoint(unpack(plan.rows).tolist())


def _crash() -> None:
    os.abort()


def _exit() -> None:
    os._exit(3)


def _error() -> None:
    raise RuntimeError("a fault that was asked for")


def _hang() -> None:
    while True:
        signal.pause()


def _fail() -> None:
    raise StepFailedError("a failed allocation that was asked for")


_HAPPENS: Final[dict[FaultKind, Callable[[], None]]] = {
    FaultKind.CRASH: _crash,
    FaultKind.EXIT: _exit,
    FaultKind.ERROR: _error,
    FaultKind.HANG: _hang,
    FaultKind.FAIL: _fail,
}
