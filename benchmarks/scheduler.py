"""What a steady decode step costs the engine loop: schedule, update, publish, by batch size.

    python benchmarks/scheduler.py [--steps 300]

Runs the real scheduler and KV manager over a runner that takes no time; medians in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np

from servelite.config import Settings
from servelite.engine.build import build_engine
from servelite.engine.mailbox import Event
from servelite.executor.in_process import InProcessExecutor
from servelite.ipc.messages import Add, KVGroup, Outputs, SamplingParams, pack
from servelite.ipc.progress import ProgressPage
from servelite.ipc.sockets import encode
from servelite.worker.base import RunnerFacts
from servelite.worker.simulated import SimulatedRunner

BATCHES = (1, 8, 32, 128, 256)


class _Sink:
    """A mailbox that encodes what it is given, as the real one does, and drops it."""

    def __init__(self) -> None:
        self.inbox: list[tuple[int, Event]] = []

    def receive(self, timeout: float | None) -> Iterator[tuple[int, Event]]:
        while self.inbox:
            yield self.inbox.pop()

    def send(self, client: int, outputs: Outputs) -> None:
        encode(outputs)

    def clients(self) -> list[int]:
        return [0]


def measure(batch: int, steps: int) -> dict[str, float]:
    """Median microseconds of each part of a step in which `batch` requests decode."""
    settings = Settings(
        executor="simulated", max_num_seqs=batch, max_num_batched_tokens=max(4096, batch * 16), block_size=16
    )
    length = steps + 64
    blocks = batch * -(-length // 16)
    facts = RunnerFacts(blocks, 16, length, 50_000, (KVGroup("full", (0,), 1),), "none", "none")
    sink = _Sink()
    executor = InProcessExecutor(SimulatedRunner(facts, batch), 1)
    core = build_engine(settings, executor, sink, ProgressPage.create())
    for number in range(batch):
        sampling = SamplingParams(max_tokens=steps + 32)
        sink.inbox.append((0, Add(number, pack(np.arange(16)), sampling, seed=number)))
    for _ in range(4):
        core.iterate()
    scheduler, times = core._scheduler, {"schedule": [], "update": [], "publish": []}  # type: ignore[var-annotated]
    for _ in range(steps):
        marks = [time.perf_counter()]
        plan = scheduler.schedule()
        assert plan is not None
        marks.append(time.perf_counter())
        step = executor.forward(plan)
        executor.sample(step, None)
        marks.append(time.perf_counter())
        scheduler.update(plan, step.result())
        marks.append(time.perf_counter())
        core._publish()
        marks.append(time.perf_counter())
        times["schedule"].append(marks[1] - marks[0])
        times["update"].append(marks[3] - marks[2])
        times["publish"].append(marks[4] - marks[3])
    executor.close()
    return {part: statistics.median(values) * 1e6 for part, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print(f"{'batch':>6} {'schedule':>9} {'update':>9} {'publish':>9} {'sum':>9}   (us, median of {steps})")
    for batch in BATCHES:
        parts = measure(batch, steps)
        print(f"{batch:>6} " + " ".join(f"{v:>9.0f}" for v in [*parts.values(), sum(parts.values())]))


if __name__ == "__main__":
    main()
