"""The bytes of answers: SSE chunks from templates made once a choice, and whole JSON answers.

A chunk of text costs one JSON string and one concatenation; nothing else happens per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from servelite.frontend.errors import APIError
from servelite.frontend.logprobs import Logprobs
from servelite.frontend.parsers.assembled import Assembled
from servelite.frontend.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from servelite.frontend.protocol import AnswerForm, ChatRequest

_DONE: Final = b"data: [DONE]\n\n"
WAITING: Final = b": waiting\n\n"  # an SSE comment: keeps balancers from closing a stream that waits

_encode = msgspec.json.encode


@dataclass(frozen=True)
class Usage:
    """Token counts of an answer, or of all answers to a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt's
    reasoning_tokens: int | None = None  # of the answers'; None: that cannot be told apart

    def to_dict(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return counts


@dataclass(frozen=True)
class AnswerHead:
    """What all chunks of an answer share, and its whole form."""

    chat: bool
    answer_id: str
    created: int  # seconds since 1970
    model: str
    may_call: bool = False  # functions: to some clients an empty content would be an answer


class Chunks(Protocol):
    """What is sent of one choice, in the words of some API: the bytes of whole events, of none where there
    is nothing to tell.

    Attributes:
        waiting: what is sent in a silence.
    """

    waiting: bytes = WAITING

    def note_usage(self, usage: Usage) -> None:
        """The counts so far: before `first`, and before each chunk where the client asks for that."""
        ...

    def first(self, prompt_token_ids: Sequence[int] | None) -> bytes:
        """What comes before all else, with the prompt's token IDs if they are asked for."""
        ...

    def text(self, text: str) -> bytes:
        """More text, which is no call or reasoning."""
        ...

    def event(self, event: Event) -> bytes:
        """What a parser found."""
        ...

    def rich(self, piece: str | Event, logprobs: Logprobs | None, more: dict[str, Any]) -> bytes:
        """Text or what a parser found, its logprobs, and `more` fields of the choice."""
        ...

    def finish(self, reason: str, stop_reason: str | int | None) -> bytes:
        """The choice's end; `stop_reason`: the client's stop string or token."""
        ...

    def done(self, usage: Usage) -> bytes:
        """The stream's end, after all choices; `usage`: of all of them."""
        ...

    def failed(self, error: APIError) -> bytes:
        """The end of a stream that is open and will not be complete."""
        ...


class Translation(Chunks, Protocol):
    """One request of another API in terms of a chat, and its answer, of which it keeps what came so far."""

    chat: ChatRequest

    def whole(self) -> bytes:
        """After `done`: the JSON body of an answer that is not streamed."""
        ...


class StreamTemplate(Chunks):
    """The chunks of one choice of a streamed answer, in OpenAI's shape."""

    def __init__(self, head: AnswerHead, form: AnswerForm, index: int = 0) -> None:
        kind = "chat.completion.chunk" if head.chat else "text_completion"
        fields = {"id": head.answer_id, "object": kind, "created": head.created, "model": head.model}
        self._head = b"data: " + _encode(fields)[:-1]
        self._chat = head.chat
        self._first = b'"delta":' + _encode({"role": "assistant", "content": None if head.may_call else ""})
        self._opening = self._head + b',"choices":[{"index":%d,' % index
        self._before = self._opening + (b'"delta":{"content":' if head.chat else b'"text":')
        self._call = -1  # whose arguments `_before_arguments` begins
        self._before_arguments = b""
        self._form = form
        self._end_with(b',"usage":null' if form.include_usage else b"")

    def _end_with(self, usage: bytes) -> None:
        self._tail = usage + b"}\n\n"
        self._closing = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._after = (b"}" if self._chat else b"") + self._closing

    def note_usage(self, usage: Usage) -> None:
        """The chunks from here on have these counts, if `continuous_usage_stats` is on."""
        if self._form.continuous_usage:
            self._end_with(b',"usage":' + _encode(usage.to_dict()))

    def first(self, prompt_token_ids: Sequence[int] | None) -> bytes:
        """The chunk that names the role. Completions have none: the IDs come with the first text (`rich`)."""
        if not self._chat:
            return b""
        chunk = self._opening + self._first + self._closing
        if prompt_token_ids is None:
            return chunk
        return chunk.removesuffix(b"}\n\n") + b',"prompt_token_ids":' + _encode(prompt_token_ids) + b"}\n\n"

    def text(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after

    def event(self, event: Event) -> bytes:
        return b"" if isinstance(event, CallEnd) else self._delta(event) + self._closing

    def rich(self, piece: str | Event, logprobs: Logprobs | None, more: dict[str, Any]) -> bytes:
        if isinstance(piece, str):
            content = self._before + _encode(piece) + (b"}" if self._chat else b"")
        else:
            content = self._delta(piece)
        written = logprobs if isinstance(logprobs, bytes) else _encode(logprobs)
        rest = b"," + _encode(more)[1:] if more else b"}"
        return b"".join((content, b',"logprobs":', written, b',"finish_reason":null', rest, b"]", self._tail))

    def _delta(self, event: Event) -> bytes:
        """A chunk up to the end of what of a message the event adds to."""
        # Not `match`: this is done for each token.
        if isinstance(event, Arguments):
            if event.call != self._call:
                self._call = event.call
                delta = b'%b"delta":{"tool_calls":[{"index":%d,"function":{"arguments":'
                self._before_arguments = delta % (self._opening, event.call)
            return self._before_arguments + _encode(event.text) + b"}}]}"
        if isinstance(event, Content):
            return self._before + _encode(event.text) + b"}"
        if isinstance(event, Reasoning):
            return self._opening + b'"delta":{"reasoning_content":' + _encode(event.text) + b"}"
        delta = b"{}"
        if isinstance(event, CallStart):
            called = {"name": event.name, "arguments": ""}
            call = {"index": event.call, "id": event.call_id, "type": "function", "function": called}
            delta = _encode({"tool_calls": [call]})
        return self._opening + b'"delta":' + delta

    def finish(self, reason: str, stop_reason: str | int | None) -> bytes:
        content = b'"delta":{}' if self._chat else b'"text":""'
        ending = (
            b',"logprobs":null,"finish_reason":'
            + _encode(reason)
            + b',"stop_reason":'
            + _encode(stop_reason)
            + b"}]"
        )
        return self._opening + content + ending + self._tail

    def done(self, usage: Usage) -> bytes:
        """If it is asked for, a chunk with no choices and the token counts; and OpenAI's last event."""
        if not self._form.include_usage:
            return _DONE
        return self._head + b',"choices":[],"usage":' + _encode(usage.to_dict()) + b"}\n\n" + _DONE

    def failed(self, error: APIError) -> bytes:
        """An error. No `[DONE]` follows: the answer is not done."""
        return b"data: " + error.body() + b"\n\n"


def message_of(answer: Assembled) -> dict[str, Any]:
    """A chat's message, in OpenAI's shape."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message


@dataclass(frozen=True)
class Choice:
    """One finished choice. `more`: fields beside OpenAI's."""

    answer: Assembled
    finish_reason: str
    logprobs: Logprobs | None
    more: dict[str, Any]


def whole_answer(
    head: AnswerHead, choices: Sequence[Choice], usage: Usage, more: dict[str, Any] | None = None
) -> bytes:
    """An answer that is not streamed; `more`: fields beside OpenAI's."""
    made = []
    for index, choice in enumerate(choices):
        written = msgspec.Raw(choice.logprobs) if isinstance(choice.logprobs, bytes) else choice.logprobs
        fields: dict[str, Any] = {"index": index, "logprobs": written}
        fields["finish_reason"] = choice.finish_reason
        if head.chat:
            fields["message"] = message_of(choice.answer)
        else:
            fields["text"] = choice.answer.content
        made.append(fields | choice.more)
    return _encode(
        {
            "id": head.answer_id,
            "object": "chat.completion" if head.chat else "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": made,
            "usage": usage.to_dict(),
        }
        | (more or {})
    )
