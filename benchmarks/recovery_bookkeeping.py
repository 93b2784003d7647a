"""What the bookkeeping for recovery costs a front end: microseconds of its CPU time a token.

    python benchmarks/recovery_bookkeeping.py [--tokens 400] [--pairs 5]

The path of the engine's outputs through a front end, from the decoded message to the tokens in their
consumer's hands: as it is, and without what only a resumption needs. The two alternate; of each pair the
difference is taken, and of the pairs the median. What recovery needs in it: that the tokens (and the log
probabilities) which a client has had are kept, each column's first index is read and compared, the epoch is,
and who has passed is looked at. Resubmitting itself happens at deaths only and is not in it. The columns and
the epoch are read once a step: with one stream its only token bears all of that.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from servelite.frontend.admission import Admission, Place
from servelite.frontend.body import ClientGone
from servelite.frontend.engine_client import EngineClient
from servelite.frontend.logprobs import LogprobTable
from servelite.frontend.request import RequestRecord
from servelite.ipc.messages import (
    FLAG,
    NUMBER,
    Add,
    FinishReason,
    FromEngine,
    Load,
    Outputs,
    SamplingParams,
    TokenLogprobs,
    pack,
    unpack,
)
from servelite.observability.metrics import Metrics

EPOCH = 1


@dataclass(frozen=True)
class Case:
    """Streams that get a token a step each, with so many likeliest alternatives (-1: no logprobs)."""

    streams: int
    logprobs: int = -1

    def __str__(self) -> str:
        return f"{self.streams} at once" + (f", logprobs {self.logprobs}" if self.logprobs >= 0 else "")


CASES = (Case(64), Case(8), Case(1), Case(64, logprobs=2))


class ForgetfulTable(LogprobTable):
    """Keeps the entries of the last step only, in whatever order they come."""

    def take(self, part: TokenLogprobs) -> None:
        self.first += len(self._chosen)
        self._chosen, self._values = array("f", part.chosen), array("f", part.values)
        self._ids = array("i", part.ids)
        self._k = part.k


class ForgetfulRecord(RequestRecord):
    """Keeps no token that its consumer has taken, and believes whatever comes to be the next one."""

    __slots__ = ("_pending",)

    def __init__(self, add: Add, place: Place) -> None:
        super().__init__(add, place)
        self.logprobs = ForgetfulTable(0)
        self._pending: list[int] = []

    def deliver(self, first_index: int, tokens: list[int], finish: int) -> None:
        if self._pending:
            self._pending += tokens
        else:
            self._pending = tokens
        if finish:
            self.finish = FinishReason(finish)
            self._ended = True
        self.wake()

    @property
    def has_news(self) -> bool:
        return bool(self._pending) or self._ended

    def take(self) -> list[int]:
        if self._gone:
            raise ClientGone
        tokens, self._pending = self._pending, []
        if self.error is not None and not tokens:
            raise self.error.with_traceback(None)
        return tokens


class ForgetfulClient(EngineClient):
    """The same path for an engine that never dies: no epoch, no first index, nobody awaited."""

    def submit(self, add: Add, place: Place) -> RequestRecord:
        record = ForgetfulRecord(add, place)
        self._active[record.number] = record
        self._send(record.first_message())
        if record.choice == 0:
            self._metrics.prompt_tokens.inc(record.prompt_tokens)
        return record

    def _take(self, epoch: int, message: FromEngine) -> None:
        assert isinstance(message, Outputs)
        self._take_outputs(message)

    def _take_outputs(self, outputs: Outputs) -> None:
        self._metrics.engine.load = outputs.load
        if outputs.logprobs or outputs.prompt_logprobs or outputs.timings:
            self._take_side_tables(outputs)
        numbers = unpack(outputs.requests, NUMBER).tolist()
        if not numbers:
            return
        now = time.monotonic()
        tokens: list[int] = unpack(outputs.tokens).tolist()
        at = 0
        gaps = self._metrics.inter_token_latency
        for number, count, finish in zip(
            numbers, unpack(outputs.counts).tolist(), unpack(outputs.finish, FLAG).tolist(), strict=True
        ):
            record = self._active.get(number)
            if record is not None:
                if count:
                    if record.last_token_at:
                        gaps.observe(now - record.last_token_at)
                    else:
                        self._metrics.time_to_first_token.observe(now - record.arrived)
                    record.last_token_at = now
                record.deliver(0, tokens[at : at + count], finish)
                if finish:
                    self._take_end(record, outputs, now)
            at += count
        self._metrics.generation_tokens.inc(at)


class Workload(NamedTuple):
    """Requests, and the messages that answer them."""

    adds: list[Add]
    steps: list[Outputs]


def workload(case: Case, tokens: int) -> Workload:
    """`tokens` tokens for each stream, one a step, all in step."""
    n, k = case.streams, case.logprobs
    numbers = range(1, n + 1)
    sampling = SamplingParams(tokens, logprobs=k)
    adds = [Add(number, pack([1, 2, 3]), sampling, seed=number) for number in numbers]
    values = np.linspace(-1, -2, max(k, 1), dtype="<f4").tobytes()
    steps = [
        Outputs(
            0,
            EPOCH,
            index,
            Load(running=n, steps=index),
            requests=pack(list(numbers), NUMBER),
            first_index=pack([index] * n),
            counts=pack([1] * n),
            finish=pack([FinishReason.LENGTH if index == tokens - 1 else FinishReason.NONE] * n, FLAG),
            tokens=pack([1000 + (index * 131 + i * 7919) % 4000 for i in range(n)]),
            logprobs={
                number: TokenLogprobs(index, k, values[:4], pack(list(range(k))), values)
                for number in numbers
            }
            if k >= 0
            else {},
        )
        for index in range(tokens)
    ]
    return Workload(adds, steps)


def read_all(kind: type[EngineClient], work: Workload) -> tuple[float, int]:
    """(seconds of CPU time, sum of the tokens): all requests from their start to their end."""
    client = kind(0, Metrics("demo"), lambda: 1)
    places = Admission(np.zeros((2, 64), np.int64), 0, len(work.adds), 0).enter(len(work.adds))
    logprobs = work.adds[0].sampling.logprobs >= 0
    total = 0
    gc.collect()
    gc.disable()  # a front end looks for cycles rarely; here it would be by chance in one of a pair
    try:
        began = time.thread_time()
        records = [client.submit(add, place) for add, place in zip(work.adds, places, strict=True)]
        for at, step in enumerate(work.steps):
            client._take(EPOCH, step)
            for record in records:
                if record.has_news:
                    total += sum(record.take())
                    if logprobs:
                        record.logprobs.at(at)
        del records, record
        return time.thread_time() - began, total
    finally:
        gc.enable()


async def measure(case: Case, tokens: int, pairs: int) -> list[tuple[float, float]]:
    """Of each pair, microseconds a token (as it is, without what recovery needs).

    Raises:
        ValueError: the two do not hand out the same tokens.
    """
    work = workload(case, tokens)
    scale = 1e6 / (tokens * case.streams)
    figures = []
    for at in range(pairs + 1):
        kinds = (EngineClient, ForgetfulClient) if at % 2 else (ForgetfulClient, EngineClient)
        read = {kind: read_all(kind, work) for kind in kinds}
        (real, told), (bare, bare_told) = read[EngineClient], read[ForgetfulClient]
        if told != bare_told:
            raise ValueError(f"tokens that add up to {told}, and to {bare_told}")
        if at:  # the first warms up
            figures.append((real * scale, bare * scale))
    return figures


def cost(figures: list[tuple[float, float]]) -> float:
    """The median difference, in microseconds a token."""
    return statistics.median(real - bare for real, bare in figures)


def main() -> None:
    """Print the figures of each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    for case in CASES:
        tokens = options.tokens * max(1, 16 // case.streams)  # enough of them to be measured
        figures = asyncio.run(measure(case, tokens, options.pairs))
        real, bare = (statistics.median(column) for column in zip(*figures, strict=True))
        least, most = (pick(r - b for r, b in figures) for pick in (min, max))
        print(
            f"{case}: recovery costs {cost(figures):.3f} us a token ({least:.3f} to {most:.3f}); "
            f"the path {real:.2f} with it, {bare:.2f} without"
        )


if __name__ == "__main__":
    main()
