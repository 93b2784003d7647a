"""Load at one level after another: so many streams at once, or requests that arrive at a rate."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from servelite.bench.prompts import Request, Workload
from servelite.bench.stream_client import End, Outcome, StreamClient
from servelite.bench.target import BenchError

LONG_PROMPT_OUTPUT: Final = 16  # tokens that the long prompt's answer has
_BEGUN: Final = 16  # chunks of each stream before the long prompt is sent
_AFTER_FAILURE_S: Final = 0.1  # a stream's pause: a server that refuses is not hammered
_WATCH_S: Final = 0.2


@dataclass(frozen=True)
class Level:
    """Either `streams`, each of which sends its next request when its last one has ended, or `rate`:
    requests a second that arrive at random (Poisson) times, however many are in flight."""

    streams: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        if self.rate:
            return f"{self.rate:g} requests/s"
        return f"{self.streams} stream" + ("s" if self.streams > 1 else "")


@dataclass(frozen=True)
class Amount:
    """When a level ends: after `requests`, or when none was begun for `seconds`' end (0: by requests).

    `requests` 0 and no seconds: by the level, 4 for each stream and at least 8; 100 at a rate.
    """

    requests: int = 0
    seconds: float = 0.0

    def requests_of(self, level: Level) -> int | None:
        """None: no limit but the time."""
        if self.seconds:
            return None
        return self.requests or (100 if level.rate else max(8, 4 * level.streams))


@dataclass
class LevelRun:
    """What a level has given so far. Times by `time.perf_counter`."""

    level: Level
    requests: int | None
    seconds: float
    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    cpu_seconds: float = 0.0  # of this process
    outcomes: list[Outcome] = field(default_factory=list)  # without the long prompt's
    long_prompt: Outcome | None = None


class LoadGenerator:
    """Runs levels, one after the other, until it is told to stop."""

    def __init__(
        self,
        workload: Workload,
        amount: Amount,
        *,
        timeout: float,
        long_prompt: int = 0,
        watch: Callable[[LevelRun, Sequence[Outcome]], None] | None = None,
    ) -> None:
        """
        Args:
            timeout: seconds after which a request has failed.
            long_prompt: tokens of a prompt that arrives once all streams of a level decode; 0: none.
            watch: called some times a second with the level's run and what is in flight.
        """
        self._workload, self._amount, self._long_prompt = workload, amount, long_prompt
        self._client = StreamClient(workload.target.address, timeout)
        self._watch = watch
        self.stopped = False

    def stop(self) -> None:
        """Begin no more requests and give up those in flight; `levels` then ends with what it has."""
        self.stopped = True
        self._client.give_up()

    async def warm_up(self, count: int) -> None:
        """Send `count` requests at once and measure nothing.

        Raises:
            BenchError: one of them failed.
        """
        for outcome in await asyncio.gather(*map(self._client.send, self._workload.warm_up(count))):
            if outcome.end is End.FAILED:
                raise BenchError(f"a warm-up request failed: {outcome.error}")

    async def levels(self, levels: Sequence[Level]) -> AsyncIterator[LevelRun]:
        """Each level's run when it is over, the one that was stopped being the last."""
        for number, level in enumerate(levels):
            if self.stopped:
                return
            yield await self._run(level, f"level {number}")

    async def _run(self, level: Level, part: str) -> LevelRun:
        requests = self._amount.requests_of(level)
        source: Iterator[Request] = self._workload.requests(part)
        if requests is not None:  # made before the clock starts
            source = iter(list(itertools.islice(source, requests)))
        run = LevelRun(level, requests, self._amount.seconds)
        cpu = time.process_time()
        load = self._arrivals(run, source, part) if level.rate else self._streams(run, source)
        tasks = [asyncio.create_task(load)]
        if self._long_prompt:
            tasks.append(asyncio.create_task(self._send_long_prompt(run, part)))
        waiting = set(tasks)
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=_WATCH_S)
            if self._watch is not None:
                self._watch(run, self._client.running)
        run.ended = max((outcome.ended for outcome in run.outcomes), default=time.perf_counter())
        run.cpu_seconds = time.process_time() - cpu
        for task in tasks:
            task.result()
        return run

    def _next(self, run: LevelRun, source: Iterator[Request]) -> Request | None:
        over = run.seconds and time.perf_counter() - run.started >= run.seconds
        return None if self.stopped or over else next(source, None)

    async def _streams(self, run: LevelRun, source: Iterator[Request]) -> None:
        async def stream() -> None:
            while (request := self._next(run, source)) is not None:
                outcome = await self._client.send(request)
                run.outcomes.append(outcome)
                if outcome.end is End.FAILED:
                    await asyncio.sleep(_AFTER_FAILURE_S)

        await asyncio.gather(*(stream() for _ in range(run.level.streams)))

    async def _arrivals(self, run: LevelRun, source: Iterator[Request], part: str) -> None:
        async def one(request: Request) -> None:
            run.outcomes.append(await self._client.send(request))

        times = random.Random(f"{self._workload.seed} {part} arrivals")
        due = run.started
        sent: set[asyncio.Task[None]] = set()
        while (request := self._next(run, source)) is not None:
            sent.add(asyncio.create_task(one(request)))
            due += times.expovariate(run.level.rate)
            while not self.stopped and (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(min(left, _WATCH_S))
        if sent:
            await asyncio.gather(*sent)

    async def _send_long_prompt(self, run: LevelRun, part: str) -> None:
        """Wait until every stream of the level has begun its answer, then send it."""
        while len([o for o in self._client.running if len(o.chunks) >= _BEGUN]) < run.level.streams:
            if self.stopped or len(run.outcomes) == run.requests:
                return
            await asyncio.sleep(0.01)
        request = self._workload.request(f"{part} long", self._long_prompt, LONG_PROMPT_OUTPUT)
        run.long_prompt = await self._client.send(request)
