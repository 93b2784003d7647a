"""The bytes of answers: SSE chunks from templates made once a request, and whole JSON answers.

A chunk of text costs one JSON string and one concatenation; nothing else happens per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
WAITING: Final = b": waiting\n\n"  # an SSE comment: keeps balancers from closing a stream that waits

_encode = msgspec.json.encode


@dataclass(frozen=True)
class Usage:
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int

    def to_dict(self) -> dict[str, int]:
        """As OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class StreamTemplate:
    """The chunks of one streamed answer, in OpenAI's shape for `chat` or for legacy completions."""

    def __init__(self, *, chat: bool, answer_id: str, created: int, model: str, include_usage: bool) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": answer_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + _encode(head)[:-1]
        self._tail = (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._chat = chat
        opening = b',"choices":[{"index":0,'
        if chat:
            self._before = self._head + opening + b'"delta":{"content":'
            self._after = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        else:
            self._before = self._head + opening + b'"text":'
            self._after = b',"logprobs":null,"finish_reason":null}]' + self._tail

    def first(self) -> bytes:
        """The chunk that names the role; completions have none."""
        if not self._chat:
            return b""
        choice = b',"choices":[{"index":0,"delta":{"role":"assistant","content":""}'
        return self._head + choice + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def text(self, text: str) -> bytes:
        """A chunk with more text."""
        return self._before + _encode(text) + self._after

    def finish(self, reason: str) -> bytes:
        """The chunk that says why the answer ended."""
        content = b'"delta":{}' if self._chat else b'"text":""'
        return (
            self._head
            + b',"choices":[{"index":0,'
            + content
            + b',"logprobs":null,"finish_reason":'
            + _encode(reason)
            + b"}]"
            + self._tail
        )

    def usage(self, usage: Usage) -> bytes:
        """The last chunk: no choices, the token counts."""
        return self._head + b',"choices":[],"usage":' + _encode(usage.to_dict()) + b"}\n\n"


def whole_answer(
    *, chat: bool, answer_id: str, created: int, model: str, text: str, finish_reason: str, usage: Usage
) -> bytes:
    """An answer that is not streamed."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    if chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    return _encode(
        {
            "id": answer_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": model,
            "choices": [choice],
            "usage": usage.to_dict(),
        }
    )


def error_event(body: bytes) -> bytes:
    """An error in a stream that is open. No `[DONE]` follows: the answer is not done."""
    return b"data: " + body + b"\n\n"
