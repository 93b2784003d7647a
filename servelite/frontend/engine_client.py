"""A front end's connection to the engine: numbers requests, hands out what each step produced."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from servelite.frontend.admission import Place
from servelite.frontend.errors import APIError, from_engine
from servelite.frontend.request import RequestRecord
from servelite.ipc.messages import (
    CONTRACT_VERSION,
    FLAG,
    NUMBER,
    Abort,
    Add,
    FinishReason,
    Hello,
    Outputs,
    Ready,
    ToEngine,
    pack,
    unpack,
)
from servelite.ipc.sockets import connect_engine_async, decode_from_engine, encode
from servelite.observability.metrics import Metrics

if TYPE_CHECKING:
    import zmq.asyncio

log = logging.getLogger(__name__)


class ContractMismatch(RuntimeError):
    """Front end and engine are of different versions."""


class EngineClient:
    """Lives on one event loop. `run` is the one task that reads the socket."""

    def __init__(self, client: int, metrics: Metrics, retry_after: Callable[[], int]) -> None:
        """`retry_after`: seconds that a client refused for a full queue is told to wait."""
        self._client = client
        self._metrics = metrics
        self._retry_after = retry_after
        self._socket: zmq.asyncio.Socket | None = None
        self._epoch = -1
        self._numbers = 0
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._active: dict[int, RequestRecord] = {}

    async def run(self, address: str, epoch: int) -> None:
        """Connect, say hello, and read until cancelled.

        Raises:
            ContractMismatch: the engine speaks another version.
            msgspec.MsgspecError: it sent what is no message.
        """
        self._epoch = epoch
        self._socket = connect_engine_async(address, self._client)
        try:
            self._send(Hello(self._client, CONTRACT_VERSION))
            while True:
                message = decode_from_engine(await self._socket.recv())
                if message.epoch != self._epoch:
                    continue  # a late word of an engine that is dead
                if isinstance(message, Ready):
                    self._take_ready(message)
                else:
                    self._take_outputs(message)
        finally:
            self._socket.close()
            self._socket = None

    async def ready(self) -> Ready:
        """The engine's facts, once it has told them."""
        return await asyncio.shield(self._ready)

    @property
    def facts(self) -> Ready | None:
        """The engine's facts, None before it is ready."""
        return self._ready.result() if self._ready.done() else None

    def new_number(self) -> int:
        """The number of the next request."""
        self._numbers += 1
        return self._numbers

    def submit(self, add: Add, place: Place) -> RequestRecord:
        """Start a request; its place is given back when it ends."""
        record = RequestRecord(add, place)
        self._active[record.number] = record
        self._send(record.add_message())
        if record.choice == 0:
            self._metrics.prompt_tokens.inc(record.prompt_tokens)
        return record

    def abort(self, record: RequestRecord, reason: str) -> None:
        """End a request early, counted as `reason`; nothing happens if it has ended."""
        if self._active.pop(record.number, None) is not None:
            self._send(Abort(pack([record.number], NUMBER)))
            record.place.leave()
            self._metrics.finished(reason)

    def fail_all(self, error: APIError) -> int:
        """End every unfinished request with `error`; returns how many there were."""
        records = list(self._active.values())
        for record in records:
            self.abort(record, "error")
            record.fail(error)
        return len(records)

    def _send(self, message: ToEngine) -> None:
        if self._socket is not None:
            # Done at once, or queued in order: the socket has no high-water mark, admission bounds it.
            self._socket.send(encode(message))

    def _take_ready(self, ready: Ready) -> None:
        if ready.contract != CONTRACT_VERSION:
            raise ContractMismatch(
                f"the engine speaks contract version {ready.contract}, this front end {CONTRACT_VERSION}"
            )
        self._metrics.engine.take_ready(ready)
        if not self._ready.done():
            self._ready.set_result(ready)

    def _take_outputs(self, outputs: Outputs) -> None:
        """Hand a step's tokens to their requests; each consumer is woken once."""
        self._metrics.engine.load = outputs.load
        # A chunk of a prompt has logprobs and no token: the tables come first, whatever the columns hold.
        if outputs.logprobs or outputs.prompt_logprobs or outputs.timings:
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
        for number, timings in outputs.timings.items():
            if (record := self._active.get(number)) is not None:
                record.cached_tokens = timings.cached_tokens

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
