"""What a steady decode step costs the engine's loop: the loop itself runs, over steps that take no time.

Its executor and its mailbox note when the loop calls them; what lies between is the loop's own work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from servelite.config import Settings
from servelite.engine.build import build_engine
from servelite.engine.mailbox import Event
from servelite.executor.base import InFlight
from servelite.executor.in_process import InProcessExecutor
from servelite.ipc.messages import Add, Outputs, Plan, SamplingParams, StepResult, pack
from servelite.ipc.progress import ProgressPage
from servelite.ipc.sockets import encode
from servelite.worker.simulated import SimulatedRunner, simulated_facts

_VOCABULARY = 50_000
_WARM_UP = 16  # steps


@dataclass(frozen=True)
class LoopCosts:
    """Medians over decode steps of `batch` requests, in microseconds."""

    batch: int
    schedule_us: float  # from the messages taken to the executor's call
    update_us: float  # from the step's result to the message for the front end
    encode_outputs_us: float  # that message in msgpack
    encode_plan_us: float  # the plan in msgpack, as it goes to worker processes; one process needs none


@dataclass
class _Marks:
    """When the loop did what in its last step, and how long the encodings took, in seconds."""

    taken: float = 0.0
    planned: float = 0.0
    result: float = 0.0
    published: float = 0.0
    encode_outputs: float = 0.0
    encode_plan: float = 0.0


@dataclass
class _Step:
    """The executor's step; notes when the loop has its result."""

    step: InFlight
    marks: _Marks

    @property
    def plan(self) -> Plan:
        return self.step.plan

    def result(self) -> StepResult:
        result = self.step.result()
        self.marks.result = time.perf_counter()
        return result


class _TimedExecutor:
    """The in-process executor. Encodes each plan too, off the loop's clock."""

    def __init__(self, executor: InProcessExecutor, marks: _Marks) -> None:
        self._executor, self._marks, self.facts = executor, marks, executor.facts

    def forward(self, plan: Plan) -> InFlight:
        began = self._marks.planned = time.perf_counter()
        msgspec.msgpack.encode(plan)
        self._marks.encode_plan = time.perf_counter() - began
        return _Step(self._executor.forward(plan), self._marks)

    def sample(self, step: InFlight, masks: bytes | None) -> None:
        assert isinstance(step, _Step)
        self._executor.sample(step.step, masks)

    def close(self) -> None:
        self._executor.close()


class _TimedMailbox:
    """Gives the loop what lies in `inbox`; encodes what it is given, as the real one does, and drops it."""

    def __init__(self, marks: _Marks) -> None:
        self._marks = marks
        self.inbox: list[tuple[int, Event]] = []

    def receive(self, timeout: float | None) -> Iterator[tuple[int, Event]]:
        while self.inbox:
            yield self.inbox.pop()
        self._marks.taken = time.perf_counter()

    def send(self, client: int, outputs: Outputs) -> None:
        began = self._marks.published = time.perf_counter()
        encode(outputs)
        self._marks.encode_outputs = time.perf_counter() - began

    def clients(self) -> list[int]:
        return [0]


def measure_loop(
    batch: int, context: int, steps: int, block_size: int, watch: Callable[[float], None] = lambda _: None
) -> LoopCosts:
    """
    Args:
        context: tokens of each request's prompt.
        steps: how many to time.
        watch: called before each step with the share of the work that is done.
    """
    length = context + steps + _WARM_UP + 2
    settings = Settings(
        executor="simulated", max_num_seqs=batch, max_num_batched_tokens=max(8192, batch),
        block_size=block_size, max_model_len=length, max_waiting_requests=batch,
        max_waiting_tokens=batch * context,
    )  # fmt: skip
    facts = simulated_facts(settings, _VOCABULARY, length)
    marks = _Marks()
    mailbox = _TimedMailbox(marks)
    executor = _TimedExecutor(InProcessExecutor(SimulatedRunner(facts, batch), 1), marks)
    core = build_engine(settings, executor, mailbox, ProgressPage.create())
    random = np.random.default_rng(0)
    for number in range(batch):
        prompt = pack(random.integers(0, _VOCABULARY, context))
        sampling = SamplingParams(max_tokens=steps + _WARM_UP + 2)
        mailbox.inbox.append((0, Add(number, prompt, sampling, seed=number)))
    for _ in range(-(-batch * context // settings.max_num_batched_tokens) + _WARM_UP):
        core.iterate()
    costs = []
    for step in range(steps):
        watch(step / steps)
        core.iterate()
        costs.append(
            (marks.planned - marks.taken, marks.published - marks.result,
             marks.encode_outputs, marks.encode_plan)
        )  # fmt: skip
    executor.close()
    return LoopCosts(batch, *(statistics.median(part) * 1e6 for part in zip(*costs, strict=True)))
