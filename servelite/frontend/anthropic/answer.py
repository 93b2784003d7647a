"""A chat's answer as an Anthropic message, whole or as the events of its making.

A message's content is a list of blocks: thinking, text, uses of tools. One block is open at a time;
what comes next of another kind closes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from servelite.frontend.chunks import Translation, Usage
from servelite.frontend.errors import APIError
from servelite.frontend.logprobs import Logprobs
from servelite.frontend.parsers.events import Arguments, CallStart, Content, Event, Reasoning
from servelite.frontend.protocol import ChatRequest

_encode: Final = msgspec.json.encode
_END: Final = ("stop_reason", "stop_sequence", "stop_details", "container")
# A list, though Anthropic has null: that, and no key at all, some clients take for malformed.
_TEXT: Final = {"type": "text", "text": "", "citations": []}
_THINKING: Final = {"type": "thinking", "thinking": "", "signature": ""}
_MORE: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By a block's type: that of its deltas, and what these name the text."""


class MessageTranslation(Translation):
    """One `/v1/messages` request and its answer."""

    waiting = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, chat: ChatRequest, *, shows_thinking: bool = True) -> None:
        """`shows_thinking`: blocks of thinking have their text."""
        self.chat = chat
        self._shows_thinking = shows_thinking
        self._content: list[dict[str, Any]] = []
        self._open = ""  # the type of the last block, if that is open
        self._parts: list[str] = []  # the open block's text
        self._before = b""  # an event with more of it, up to the text
        self._message: dict[str, Any] = {
            "id": "msg_" + uuid.uuid4().hex,
            "type": "message",
            "role": "assistant",
            "model": chat.model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
        }

    def note_usage(self, usage: Usage) -> None:
        self._message["usage"] = _usage(usage)

    def first(self, prompt_token_ids: Sequence[int] | None) -> bytes:
        return _event("message_start", {"message": self._message})

    def text(self, text: str) -> bytes:
        begin = b"" if self._open == "text" else self._begin(_TEXT)
        return begin + self._more(text)

    def event(self, event: Event) -> bytes:
        if isinstance(event, Content):
            return self.text(event.text)
        if isinstance(event, Arguments):
            return self._more(event.text)
        if isinstance(event, Reasoning):
            begin = b"" if self._open == "thinking" else self._begin(_THINKING)
            return begin + (self._more(event.text) if self._shows_thinking else b"")
        if isinstance(event, CallStart):
            use = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
            return self._begin(use | {"caller": {"type": "direct"}})
        return b""

    def rich(self, piece: str | Event, logprobs: Logprobs | None, more: dict[str, Any]) -> bytes:
        """Nothing more is told here."""
        return self.text(piece) if isinstance(piece, str) else self.event(piece)

    def finish(self, reason: str, stop_reason: str | int | None) -> bytes:
        """Nothing yet: it is told with the counts."""
        if reason == "stop" and isinstance(stop_reason, str):
            self._message |= {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        elif reason == "length":
            self._message["stop_reason"] = "max_tokens"
        else:  # a use of a tool that the model has spoilt is one as well: the client has to answer it
            used = any(block["type"] == "tool_use" for block in self._content)
            self._message["stop_reason"] = "tool_use" if used else "end_turn"
        return b""

    def done(self, usage: Usage) -> bytes:
        self.note_usage(usage)
        message = self._message
        delta = {name: message[name] for name in _END}
        told = _event("message_delta", {"delta": delta, "usage": message["usage"]})
        return self._close() + told + _event("message_stop", {})

    def failed(self, error: APIError) -> bytes:
        return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"

    def whole(self) -> bytes:
        return _encode(self._message)

    def _begin(self, block: dict[str, Any]) -> bytes:
        """Open a block like this one, which is empty."""
        closed = self._close()
        self._open = block["type"]
        self._content.append(block.copy())
        index = len(self._content) - 1
        kind, name = _MORE[self._open]
        more = _event("content_block_delta", {"index": index, "delta": {"type": kind, name: ""}})
        self._before = more.removesuffix(b'""}}\n\n')
        return closed + _event("content_block_start", {"index": index, "content_block": block})

    def _more(self, text: str) -> bytes:
        """More of the open block."""
        self._parts.append(text)
        return self._before + _encode(text) + b"}}\n\n"

    def _close(self) -> bytes:
        if not self._open:
            return b""
        block, text, spoilt = self._content[-1], "".join(self._parts), b""
        if self._open == "tool_use":
            if not text:  # no arguments at all would be told as {}
                text = '{"INVALID_JSON": ""}'
                spoilt = self._more(text)
            block["input"] = _input(text)
        else:
            block[self._open] = text
        self._open, self._parts = "", []
        return spoilt + _event("content_block_stop", {"index": len(self._content) - 1})


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))


def _input(arguments: str) -> Any:
    """The object that is written there, as it is written. What is none (cut off, or malformed) is told as
    a text, under the name that Anthropic has for it."""
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return msgspec.Raw(arguments.encode())
    except (msgspec.DecodeError, RecursionError):
        pass
    return {"INVALID_JSON": arguments}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what was cached apart from the rest of the input. Its SDKs' types have all fields."""
    thought = usage.reasoning_tokens
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": None,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": None if thought is None else {"thinking_tokens": thought},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }
