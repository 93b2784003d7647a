"""Load on a server, from options to reports: what `servelite bench serve` does."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from servelite.bench.load import Amount, Level, LevelRun, LoadGenerator
from servelite.bench.progress import ProgressLine
from servelite.bench.prompts import Lengths, WordScale, Workload
from servelite.bench.serve_report import LevelReport
from servelite.bench.stream_client import Outcome
from servelite.bench.target import open_target


@dataclass(frozen=True)
class ServeOptions:
    """What to measure. The command's help says more of each."""

    url: str
    levels: Sequence[Level]
    amount: Amount
    prompt: Lengths
    output: Lengths
    seed: int
    chat: bool = False
    model: str | None = None
    api_key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # of every request's body; None leaves one out
    prefix: int = 0
    long_prompt: int = 0
    warm_up: int = 4
    timeout: float = 600.0


def prepare(options: ServeOptions) -> Workload:
    """Reach the server and see how it counts tokens.

    Raises:
        BenchError: it does not answer, or refuses a request like those to come.
    """
    fields = {"temperature": 0, "ignore_eos": True} | dict(options.fields)
    target = open_target(
        options.url, chat=options.chat, model=options.model, api_key=options.api_key, fields=fields
    )
    scale = WordScale.measured(target, random.Random(f"{options.seed} scale"))
    return Workload(target, scale, options.prompt, options.output, options.prefix, options.seed)


def run_load(options: ServeOptions, workload: Workload, tell: Callable[[LevelReport], None]) -> bool:
    """Run all levels; `tell` gets each one's report when it is over.

    An interrupt (SIGINT) ends the run early: the level it fell into is told with what it has.

    Returns:
        False if the run was interrupted.

    Raises:
        BenchError: the warm-up failed.
    """
    line = ProgressLine()

    async def main() -> bool:
        load = LoadGenerator(
            workload,
            options.amount,
            timeout=options.timeout,
            long_prompt=options.long_prompt,
            watch=lambda run, running: _show(line, run, running),
        )
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, load.stop)
        try:
            line.show("warm-up", 0.0, f"{options.warm_up} requests")
            await load.warm_up(options.warm_up)
            async for run in load.levels(options.levels):
                line.clear()
                tell(LevelReport.of(run))
        finally:
            line.clear()
            loop.remove_signal_handler(signal.SIGINT)
        return not load.stopped

    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket for each stream
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))


def _show(line: ProgressLine, run: LevelRun, running: Sequence[Outcome]) -> None:
    passed = time.perf_counter() - run.started
    over = len(run.outcomes)
    if run.requests is not None:
        done, of = over / run.requests, f"{over}/{run.requests} requests"
    else:
        done, of = passed / run.seconds, f"{over} requests, {passed:.0f}/{run.seconds:g} s"
    chunks = sum(len(outcome.chunks) for outcome in (*run.outcomes, *running))
    failed = sum(bool(outcome.error) for outcome in run.outcomes)
    text = f"{of}, {len(running)} in flight, {chunks / passed:.1f} chunks/s"
    line.show(str(run.level), done, text + (f", {failed} FAILED" if failed else ""))
