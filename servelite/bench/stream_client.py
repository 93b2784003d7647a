"""Streaming requests, one connection each: what came when, and nothing more, at a few microseconds a chunk.

A chunk's time is taken where its bytes are read, before any of it is parsed; chunks that are read
together share it. A request's clock starts before its connection is made.
"""

from __future__ import annotations

import asyncio
import enum
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httptools
import msgspec

from servelite.bench.prompts import Request
from servelite.bench.target import error_message

_ERROR_BYTES: Final = 1 << 16  # of a refusal's body


class End(enum.Enum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    UNFINISHED = "unfinished"  # this client gave it up: the run was stopped


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_content(self) -> bool:
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(delta.content or delta.reasoning_content or delta.tool_calls)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode


@dataclass
class Outcome:
    """One request as this client saw it; times by `time.perf_counter`, in seconds."""

    max_tokens: int
    started: float
    chunks: array[float] = field(default_factory=lambda: array("d"))  # when each chunk with content was read
    ended: float = 0.0
    end: End | None = None  # None while it is in flight
    error: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None  # by the server's count
    completion_tokens: int | None = None
    cached_tokens: int = 0

    @property
    def output_tokens(self) -> int:
        """By the server's count, or the number of chunks where it gave none."""
        return len(self.chunks) if self.completion_tokens is None else self.completion_tokens

    @property
    def gaps(self) -> list[float]:
        """Seconds from each chunk to the next."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


class _Stream(asyncio.Protocol):
    """Sends one request and reads the answer to its end."""

    def __init__(self, payload: bytes, outcome: Outcome, done: asyncio.Future[None]) -> None:
        self._payload, self._outcome, self._done = payload, outcome, done
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._status = 0
        self._rest = b""  # of a line not read to its end, or of a refusal's body
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._outcome.end is None:
            self._transport.write(self._payload)
        else:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.end(End.FAILED, f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(End.FAILED, f"the connection was lost: {exc}" if exc else "the stream ended before its end")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._rest = (self._rest + body)[:_ERROR_BYTES]
            return
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    def on_message_complete(self) -> None:
        if self._status != 200:
            self.end(End.FAILED, f"status {self._status}: {error_message(self._rest)}")
        elif self._outcome.finish_reason is None:
            self.end(End.FAILED, "the stream ended before its end")
        else:
            self.end(End.COMPLETED)

    def _take(self, event: bytes) -> None:
        outcome = self._outcome
        if outcome.end is not None:
            return
        if event == b"[DONE]":
            self.end(End.COMPLETED)
            return
        try:
            chunk = _decode(event)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self.end(End.FAILED, f"a chunk that is none of OpenAI's: {error}")
            return
        if chunk.error is not None:
            self.end(End.FAILED, error_message(msgspec.json.encode({"error": chunk.error})))
            return
        for choice in chunk.choices:
            if choice.has_content():
                outcome.chunks.append(self._now)
            outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        if (usage := chunk.usage) is not None:
            outcome.prompt_tokens, outcome.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0

    def end(self, how: End, error: str = "") -> None:
        """The request is over; only the first call counts."""
        outcome = self._outcome
        if outcome.end is None:
            outcome.ended = time.perf_counter() if how is End.UNFINISHED else self._now or time.perf_counter()
            outcome.end, outcome.error = how, error
            if self._transport is not None:
                self._transport.abort()
            if not self._done.done():
                self._done.set_result(None)


class StreamClient:
    """Sends requests to one address."""

    def __init__(self, address: tuple[str, int], timeout: float) -> None:
        """`timeout`: seconds after which a request has failed."""
        self._address, self._timeout = address, timeout
        self._streams: dict[int, tuple[Outcome, _Stream]] = {}

    @property
    def running(self) -> list[Outcome]:
        """The requests in flight, oldest first."""
        return [outcome for outcome, _ in self._streams.values()]

    async def send(self, request: Request) -> Outcome:
        """Send one and wait for its end. Whatever goes wrong is in the outcome; nothing is raised."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        outcome = Outcome(request.max_tokens, time.perf_counter())
        stream = _Stream(request.payload, outcome, done)
        self._streams[id(outcome)] = (outcome, stream)
        late = loop.call_later(
            self._timeout, stream.end, End.FAILED, f"no end within --timeout {self._timeout:g} s"
        )
        connecting = asyncio.ensure_future(loop.create_connection(lambda: stream, *self._address))
        try:
            await asyncio.wait((connecting, done), return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                connecting.cancel()
            elif (error := connecting.exception()) is not None:
                stream.end(End.FAILED, f"no connection: {error}")
            await done
        finally:
            late.cancel()
            del self._streams[id(outcome)]
        return outcome

    def give_up(self) -> None:
        """End all that is in flight, as unfinished."""
        for _, stream in list(self._streams.values()):
            stream.end(End.UNFINISHED)
