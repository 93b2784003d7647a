"""The bytes of answers: SSE chunks from templates made once a choice, and whole JSON answers.

A chunk of text costs one JSON string and one concatenation; nothing else happens per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from servelite.frontend.logprobs import Logprobs
from servelite.frontend.parsers.assembled import Assembled
from servelite.frontend.parsers.events import Arguments, CallStart, Content, Event, Reasoning

DONE: Final = b"data: [DONE]\n\n"
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


class StreamTemplate:
    """The chunks of one choice of a streamed answer, in OpenAI's shape."""

    def __init__(self, head: AnswerHead, *, include_usage: bool, index: int = 0) -> None:
        kind = "chat.completion.chunk" if head.chat else "text_completion"
        fields = {"id": head.answer_id, "object": kind, "created": head.created, "model": head.model}
        self._head = b"data: " + _encode(fields)[:-1]
        self._chat = head.chat
        self._opening = self._head + b',"choices":[{"index":%d,' % index
        self._before = self._opening + (b'"delta":{"content":' if head.chat else b'"text":')
        self._end_with(b',"usage":null' if include_usage else b"")

    def _end_with(self, usage: bytes) -> None:
        self._tail = usage + b"}\n\n"
        self._closing = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._after = (b"}" if self._chat else b"") + self._closing

    def note_usage(self, usage: Usage) -> None:
        """The chunks from here on have these counts (`continuous_usage_stats`)."""
        self._end_with(b',"usage":' + _encode(usage.to_dict()))

    def first(self, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The chunk that names the role, with the prompt's token IDs if they are asked for.

        Completions have none: the IDs come with the first text (`rich`).
        """
        if not self._chat:
            return b""
        chunk = self._opening + b'"delta":{"role":"assistant","content":""}' + self._closing
        if prompt_token_ids is None:
            return chunk
        return chunk.removesuffix(b"}\n\n") + b',"prompt_token_ids":' + _encode(prompt_token_ids) + b"}\n\n"

    def text(self, text: str) -> bytes:
        """A chunk with more text."""
        return self._before + _encode(text) + self._after

    def event(self, event: Event) -> bytes:
        """A chunk with what a parser found; b"" where that is nothing to tell."""
        # Not `match`: this is done for each token.
        if isinstance(event, Arguments):
            place = b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":' % event.call
            return self._opening + place + _encode(event.text) + b"}}]" + self._after
        if isinstance(event, Content):
            return self._before + _encode(event.text) + self._after
        if isinstance(event, Reasoning):
            return self._opening + b'"delta":{"reasoning_content":' + _encode(event.text) + self._after
        if isinstance(event, CallStart):
            return self._opening + b'"delta":' + _encode(_delta(event)) + self._closing
        return b""

    def rich(self, piece: str | Event, logprobs: Logprobs | None, more: dict[str, Any]) -> bytes:
        """A chunk with text or what a parser found, its logprobs, and `more` fields of the choice."""
        if not isinstance(piece, str):
            content = self._opening + b'"delta":' + _encode(_delta(piece))
        else:
            content = self._before + _encode(piece) + (b"}" if self._chat else b"")
        if isinstance(logprobs, msgspec.Raw) and not more:  # a chat's, which is JSON already
            return content + b',"logprobs":' + bytes(logprobs) + b',"finish_reason":null}]' + self._tail
        choice = _encode({"logprobs": logprobs, "finish_reason": None} | more)
        return content + b"," + choice[1:] + b"]" + self._tail

    def finish(self, reason: str, stop_reason: str | int | None = None) -> bytes:
        """The chunk that says why the choice ended; `stop_reason`: the client's stop string or token."""
        content = b'"delta":{}' if self._chat else b'"text":""'
        ending = (
            b',"logprobs":null,"finish_reason":'
            + _encode(reason)
            + b',"stop_reason":'
            + _encode(stop_reason)
            + b"}]"
        )
        return self._opening + content + ending + self._tail

    def usage(self, usage: Usage) -> bytes:
        """The last chunk: no choices, the token counts."""
        return self._head + b',"choices":[],"usage":' + _encode(usage.to_dict()) + b"}\n\n"


def _delta(event: Event) -> dict[str, Any]:
    """What of a message an event adds to, in OpenAI's shape."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(call, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": call, "id": call_id, "type": "function", "function": function}]}
        case Arguments(call, text):
            return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
    return {}


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
        fields: dict[str, Any] = {"index": index, "logprobs": choice.logprobs}
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


def error_event(body: bytes) -> bytes:
    """An error in a stream that is open. No `[DONE]` follows: the answer is not done."""
    return b"data: " + body + b"\n\n"
