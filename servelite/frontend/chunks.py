"""The bytes of answers: SSE chunks from templates made once a choice, and whole JSON answers.

A chunk of text costs one JSON string and one concatenation; nothing else happens per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
WAITING: Final = b": waiting\n\n"  # an SSE comment: keeps balancers from closing a stream that waits

_encode = msgspec.json.encode


@dataclass(frozen=True)
class Usage:
    """Token counts of an answer, or of all answers to a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt's

    def to_dict(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


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
        self._tail = (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._chat = head.chat
        self._opening = self._head + b',"choices":[{"index":%d,' % index
        self._closing = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._before = self._opening + (b'"delta":{"content":' if head.chat else b'"text":')
        self._after = (b"}" if head.chat else b"") + self._closing

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

    def rich(self, text: str, logprobs: dict[str, Any] | None, more: dict[str, Any]) -> bytes:
        """A chunk with text, its logprobs, and `more` fields of the choice."""
        content: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        choice = _encode(content | {"logprobs": logprobs, "finish_reason": None} | more)
        return self._opening + choice[1:] + b"]" + self._tail

    def finish(self, reason: str) -> bytes:
        """The chunk that says why the choice ended."""
        content = b'"delta":{}' if self._chat else b'"text":""'
        ending = b',"logprobs":null,"finish_reason":' + _encode(reason) + b"}]"
        return self._opening + content + ending + self._tail

    def usage(self, usage: Usage) -> bytes:
        """The last chunk: no choices, the token counts."""
        return self._head + b',"choices":[],"usage":' + _encode(usage.to_dict()) + b"}\n\n"


@dataclass(frozen=True)
class Choice:
    """One finished choice. `more`: fields beside OpenAI's."""

    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None
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
            fields["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            fields["text"] = choice.text
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
