"""A front end's connection to the engine: numbers requests, hands out what each step produced.

When the engine dies, its unfinished requests are *lost*: kept, with all that it takes to go on, until
they are resubmitted to the next one or given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any

from servelite.frontend.admission import Place
from servelite.frontend.engine_link import EngineLink
from servelite.frontend.errors import APIError, from_engine
from servelite.frontend.request import RequestRecord
from servelite.ipc.messages import (
    CONTRACT_VERSION,
    FLAG,
    NUMBER,
    Abort,
    Add,
    FinishReason,
    FromEngine,
    Hello,
    Outputs,
    Ready,
    ToEngine,
    pack,
    unpack,
)
from servelite.observability.metrics import Metrics

log = logging.getLogger(__name__)


class ContractMismatch(RuntimeError):
    """Front end and engine are of different versions."""


def _nobody(numbers: list[int]) -> None:
    """Nobody asks who has passed."""


class EngineClient:
    """Lives on one event loop. `run` is the one task that reads the socket."""

    def __init__(self, client: int, metrics: Metrics, retry_after: Callable[[], int]) -> None:
        """`retry_after`: seconds that a client refused for a full queue is told to wait."""
        self._client = client
        self._metrics = metrics
        self._retry_after = retry_after
        self._link: EngineLink | None = None
        self._facts: Ready | None = None
        self._numbers = 0
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._active: dict[int, RequestRecord] = {}
        self._lost: set[int] = set()  # of these, those that the engine does not know
        self._down = False  # the engine is dead, and the next one is not to be given new requests yet
        self._awaited: set[int] = set()  # of those resubmitted, those of whose next token `passed` is told
        self.passed: Callable[[list[int]], None] = _nobody
        """Told of each awaited or lost request that has had a token or has ended."""

    def run(self, address: str, epoch: int) -> Coroutine[Any, Any, None]:
        """Connect to the engine of life `epoch` and say hello: what is sent from now on is for that one.

        Returns:
            What reads until cancelled. It raises ContractMismatch, the engine speaks another version,
            and msgspec.MsgspecError, it sent what is no message.
        """
        if self._link is not None:
            self._link.close()
        if self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        link = self._link = EngineLink(address, self._client, partial(self._take, epoch))
        link.send(Hello(self._client, CONTRACT_VERSION))
        return link.read()

    def _take(self, epoch: int, message: FromEngine) -> None:
        if message.epoch != epoch:
            return  # a late word of an engine that is dead
        if isinstance(message, Ready):
            self._take_ready(message)
        else:
            self._take_outputs(message)

    async def ready(self) -> Ready:
        """The engine's facts, once it has told them."""
        return await asyncio.shield(self._ready)

    @property
    def facts(self) -> Ready | None:
        """The engine's facts (after its death, still those of that one), None before it is ready."""
        return self._facts

    def new_number(self) -> int:
        """The number of the next request."""
        self._numbers += 1
        return self._numbers

    def submit(self, add: Add, place: Place) -> RequestRecord:
        """Start a request; its place is given back when it ends. Without an engine, it waits for the next."""
        record = RequestRecord(add, place)
        self._active[record.number] = record
        if self._down:
            self._lost.add(record.number)
        else:
            self._send(record.first_message())
        if record.choice == 0:
            self._metrics.prompt_tokens.inc(record.prompt_tokens)
        return record

    def abort(self, record: RequestRecord, reason: str) -> None:
        """End a request early, counted as `reason`; nothing happens if it has ended."""
        if self._active.pop(record.number, None) is None:
            return
        record.place.leave()
        self._metrics.finished(reason)
        if record.number in self._lost:
            self._lost.remove(record.number)
            self._awaited.discard(record.number)
            self.passed([record.number])
            return
        self._send(Abort(pack([record.number], NUMBER)))
        if self._awaited:
            self._note_passed([record.number])

    def fail_all(self, error: APIError) -> int:
        """End every unfinished request with `error`; returns how many there were."""
        return self._fail(list(self._active), error)

    def fail_lost(self, error: APIError) -> int:
        """The same, for those that the engine does not know."""
        return self._fail(sorted(self._lost), error)

    def _fail(self, numbers: list[int], error: APIError) -> int:
        for number in numbers:
            record = self._active[number]
            self.abort(record, "error")
            record.fail(error)
        return len(numbers)

    def lose(self) -> None:
        """The engine is dead: every unfinished request is lost."""
        self._down = True
        self._lost = set(self._active)
        self._awaited.clear()

    def resubmit(self, numbers: Collection[int] | None = None) -> None:
        """Send lost requests to the engine that `run` has connected to: those named, or all.

        Of those named, `passed` is told when they have had a token, or have ended.
        """
        self._down = self._down and numbers is not None
        chosen = self._lost.intersection(numbers) if numbers is not None else set(self._lost)
        if numbers is not None:
            self._awaited.update(chosen)
            if gone := [number for number in numbers if number not in self._active]:
                self.passed(gone)
        for number in sorted(chosen):  # whoever is waited for comes before those that wait
            record = self._active[number]
            leader = self._active.get(record.leader)
            try:
                add = record.resume_message(
                    with_leader=leader is not None and not leader.produced and record.leader not in self._lost
                )
            except APIError as error:
                self._fail([number], error)
                continue
            self._lost.remove(number)
            self._metrics.resumed.inc()
            self._send(add)

    def quarantine(self, number: int, error: APIError) -> None:
        """End the request under which the engine dies."""
        if number in self._active:
            self._metrics.quarantined.inc()
            self._fail([number], error)

    def _note_passed(self, numbers: list[int]) -> None:
        passed = self._awaited.intersection(numbers)
        if passed:
            self._awaited -= passed
            self.passed(sorted(passed))

    def _send(self, message: ToEngine) -> None:
        if self._link is not None and self._link.is_open:
            self._link.send(message)

    def _take_ready(self, ready: Ready) -> None:
        if ready.contract != CONTRACT_VERSION:
            raise ContractMismatch(
                f"the engine speaks contract version {ready.contract}, this front end {CONTRACT_VERSION}"
            )
        self._facts = ready
        self._metrics.engine.take_ready(ready)
        if not self._ready.done():
            self._ready.set_result(ready)

    def _take_outputs(self, outputs: Outputs) -> None:
        """Hand a step's tokens to their requests; each consumer is woken once."""
        self._metrics.engine.load = outputs.load
        # A chunk of a prompt has logprobs and no token: the tables come first, whatever the columns hold.
        if outputs.logprobs or outputs.prompt_logprobs or outputs.vectors or outputs.timings:
            self._take_side_tables(outputs)
        numbers = unpack(outputs.requests, NUMBER).tolist()
        if not numbers:
            return
        now = time.monotonic()
        tokens: list[int] = unpack(outputs.tokens).tolist()
        at = 0
        gaps = self._metrics.inter_token_latency
        for number, first, count, finish in zip(
            numbers,
            unpack(outputs.first_index).tolist(),
            unpack(outputs.counts).tolist(),
            unpack(outputs.finish, FLAG).tolist(),
            strict=True,
        ):
            record = self._active.get(number)
            if record is not None:
                if count:
                    if record.last_token_at:
                        gaps.observe(now - record.last_token_at)
                    else:
                        self._metrics.time_to_first_token.observe(now - record.arrived)
                    record.last_token_at = now
                record.deliver(first, tokens[at : at + count], finish)
                if finish:
                    self._take_end(record, outputs, now)
            at += count
        self._metrics.generation_tokens.inc(at)
        if self._awaited:
            self._note_passed(numbers)

    def _take_side_tables(self, outputs: Outputs) -> None:
        """What goes with the tokens, before they wake anybody."""
        for parts, table in ((outputs.prompt_logprobs, "prompt_logprobs"), (outputs.logprobs, "logprobs")):
            for number, part in parts.items():
                record = self._active.get(number)
                if record is not None:
                    try:
                        getattr(record, table).take(part)
                    except ValueError as error:  # a gap: this request is lost, the others are not
                        self.abort(record, "error")
                        record.fail(APIError(500, f"The engine lost {error}", code="engine_error"))
        for number, vector in outputs.vectors.items():
            if (record := self._active.get(number)) is not None:
                record.vector = vector
        for number, timings in outputs.timings.items():
            if (record := self._active.get(number)) is not None:
                record.note_cached(timings.cached_tokens)

    def _take_end(self, record: RequestRecord, outputs: Outputs, now: float) -> None:
        del self._active[record.number]
        record.place.leave()
        reason = record.finish
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            told = outputs.errors.get(record.number)
            record.fail(
                from_engine(told, self._retry_after())
                if told
                else APIError(500, "The engine gave the request up.", code="engine_error")
            )
        self._metrics.finished(reason.name.lower())
        self._metrics.e2e_latency.observe(now - record.arrived)
        timings = outputs.timings.get(record.number)
        if timings is not None:
            self._metrics.queue_time.observe(timings.queued)
