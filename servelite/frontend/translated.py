"""Routes that speak another API's words over a chat: the body is translated into a chat request, the
chat's answer is made as ever, and what it sends is translated on its way out.

OpenAI's chunk is the contract between the two, so that nothing of how a chat is answered is done twice.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import msgspec

from servelite.frontend.body import Message, Receive, Scope, Send, send_json
from servelite.frontend.chunks import DONE
from servelite.frontend.errors import APIError
from servelite.frontend.generation import Generation, generating, read_request
from servelite.frontend.protocol import BodyRules, ChatRequest
from servelite.frontend.service import Service

_DATA: Final = b"data: "


class Function(msgspec.Struct):
    """A called function, or more of its arguments."""

    name: str | None = None
    arguments: str | None = None


class Call(msgspec.Struct):
    """A tool call, or more of one."""

    function: Function
    index: int = 0
    id: str | None = None


class Part(msgspec.Struct):
    """More of a chat answer's message."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class LogprobContent(msgspec.Struct):
    """A choice's `logprobs`."""

    content: list[dict[str, Any]] | None = None


class Choice(msgspec.Struct):
    """More of the only choice of a chat's answer."""

    delta: Part | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: LogprobContent | None = None


class CachedTokens(msgspec.Struct):
    """Details of a prompt's count."""

    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    """Details of an answer's count."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)
    completion_tokens_details: ReasoningTokens | None = None


class ErrorObject(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    code: str | None = None


class Chunk(msgspec.Struct):
    """An event of a chat's stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorObject | None = None


_decode_chunk: Final = msgspec.json.Decoder(Chunk).decode


class Translation(Protocol):
    """One request of the other API, and its answer, of which it keeps what came so far."""

    @property
    def chat(self) -> ChatRequest:
        """The request in terms of a chat; a stream's has `include_usage`."""
        ...

    def chunk(self, chunk: Chunk) -> bytes:
        """The events for one of the chat's."""
        ...

    def done(self) -> bytes:
        """The events at the end of a stream that is complete."""
        ...

    def failed(self, error: ErrorObject) -> bytes:
        """The events at the end of a stream that is not."""
        ...

    def waiting(self) -> bytes:
        """What is sent in a silence."""
        ...

    def whole(self) -> bytes:
        """The JSON body of a complete answer, of which each `chunk` was given."""
        ...


class TranslatedChat:
    """A raw ASGI endpoint, one for each request body that `read` can make a chat of."""

    def __init__(
        self,
        service: Service,
        read: Callable[[Any, BodyRules], Translation],
        names: Sequence[tuple[str, str]],
    ) -> None:
        """`read` takes a decoded JSON body and raises `APIError`; `names`: see `renamed`."""
        self._service = service
        self._read = read
        self._names = names
        self._generation = Generation(service, chat=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await generating(self._service, scope, send, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        translation = await read_request(
            service, scope, receive, lambda body: self._read(body, service.rules)
        )
        chat = translation.chat
        with renamed(self._names):
            if chat.form.stream:
                await self._generation.answer(chat, receive, _Stream(translation, send))
                return
            chat = replace(chat, form=replace(chat.form, stream=True, include_usage=True))
            await self._generation.answer(chat, receive, _Whole(translation, send), collected=True)


class _Whole:
    """The `send` of an answer that is not streamed: it is put together from a stream's chunks, so that it
    cannot differ from one, and text and calls keep their order, which a chat's whole answer does not tell."""

    def __init__(self, translation: Translation, send: Send) -> None:
        self._translation = translation
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            return
        for event in message["body"].split(b"\n\n"):
            if event.startswith(_DATA) and event != DONE[:-2]:
                self._translation.chunk(_decode_chunk(event[len(_DATA) :]))
        if not message.get("more_body", False):
            await send_json(self._send, 200, self._translation.whole())


class _Stream:
    """The `send` of a streamed answer. Each message it gets holds whole events."""

    def __init__(self, translation: Translation, send: Send) -> None:
        self._translation = translation
        self._send = send

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.body":
            body = b"".join([self._event(event) for event in message["body"].split(b"\n\n") if event])
            message = {**message, "body": body}
        return self._send(message)

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(_DATA):
            return self._translation.waiting()
        if event == DONE[:-2]:
            return self._translation.done()
        chunk = _decode_chunk(event[len(_DATA) :])
        return (
            self._translation.chunk(chunk) if chunk.error is None else self._translation.failed(chunk.error)
        )


@contextlib.contextmanager
def renamed(names: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Errors raised inside name fields as the other API does: a path that begins with a first name, which
    is a regular expression, begins with the second. What follows may be the client's own.

    Only for errors about a translated chat: those about the client's own body name what it has sent.
    """
    try:
        yield
    except APIError as error:
        for ours, theirs in names if error.param else ():
            param, found = re.subn(rf"^{ours}(?!\w)", theirs, error.param or "")
            if found:
                error.message = error.message.replace(str(error.param), param, 1)
                error.param = param
                break
        raise


def event_bytes(name: str, fields: dict[str, Any]) -> bytes:
    """A server-sent event with its name, which these APIs have where OpenAI's chat has none."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(fields))
