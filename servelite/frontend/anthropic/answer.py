"""A chat's answer as an Anthropic message, whole or as the events of its making.

A message's content is a list of blocks: thinking, text, uses of tools. One block is open at a time;
what comes next of another kind closes it.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

import msgspec

from servelite.frontend.errors import APIError
from servelite.frontend.protocol import ChatRequest
from servelite.frontend.translated import Call, Choice, Chunk, ErrorObject, Part, Usage, event_bytes

_END: Final = ("stop_reason", "stop_sequence", "stop_details", "container")
_PING: Final = event_bytes("ping", {"type": "ping"})
_PASSING: Final = ("engine_dead", "engine_not_ready", "server_shutting_down")  # clients try again
_TEXT: Final = {"type": "text", "text": "", "citations": None}
_THINKING: Final = {"type": "thinking", "thinking": "", "signature": ""}
_MORE: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By a block's type: that of its deltas, and what these name the text."""


class MessageTranslation:
    """One `/v1/messages` request and its answer."""

    def __init__(self, chat: ChatRequest, *, shows_thinking: bool = True) -> None:
        """`shows_thinking`: blocks of thinking have their text."""
        self._chat = chat
        self._shows_thinking = shows_thinking
        self._content: list[dict[str, Any]] = []
        self._open = ""  # the type of the last block, if that is open
        self._parts: list[str] = []  # the open block's text
        self._begun = False
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
            "usage": _usage(Usage()),
        }

    @property
    def chat(self) -> ChatRequest:
        """The request in terms of a chat."""
        return self._chat

    def chunk(self, chunk: Chunk) -> bytes:
        """The events for one of the chat's."""
        if chunk.usage is not None:
            self._message["usage"] = _usage(chunk.usage)
        begin = b""
        if not self._begun:
            self._begun = True
            begin = _event("message_start", {"message": self._message})
        return begin + b"".join([self._take(choice) for choice in chunk.choices])

    def done(self) -> bytes:
        """The events at the end."""
        message = self._message
        delta = {name: message[name] for name in _END}
        told = _event("message_delta", {"delta": delta, "usage": message["usage"]})
        return self._close() + told + _event("message_stop", {})

    def failed(self, error: ErrorObject) -> bytes:
        """An error event, after which nothing comes."""
        told = APIError(503 if error.code in _PASSING else 500, error.message, code=error.code)
        return b"event: error\ndata: " + told.anthropic_body() + b"\n\n"

    def waiting(self) -> bytes:
        """A ping, once the message has begun."""
        return _PING

    def whole(self) -> bytes:
        """The message."""
        self._close()
        return msgspec.json.encode(self._message)

    def _take(self, choice: Choice) -> bytes:
        """The events for more of the answer."""
        part, out = choice.delta or Part(), b""
        if part.reasoning_content:
            out += self._block(_THINKING)
            if self._shows_thinking:
                out += self._more(part.reasoning_content)
        if part.content:
            out += self._block(_TEXT) + self._more(part.content)
        for call in part.tool_calls or ():
            if call.function.name is not None:
                out += self._close() + self._block(_tool_use(call, call.function.name))
            if call.function.arguments:
                out += self._more(call.function.arguments)
        self._note_end(choice)
        return out

    def _block(self, block: dict[str, Any]) -> bytes:
        """What it takes that a block like this one, which is empty, is open."""
        if self._open == block["type"]:
            return b""
        before = self._close()
        self._open = block["type"]
        self._content.append(block.copy())
        fields = {"index": len(self._content) - 1, "content_block": block}
        return before + _event("content_block_start", fields)

    def _more(self, text: str) -> bytes:
        """More of the open block."""
        self._parts.append(text)
        kind, name = _MORE[self._open]
        delta = {"type": kind, name: text}
        return _event("content_block_delta", {"index": len(self._content) - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        block, text = self._content[-1], "".join(self._parts)
        if self._open == "tool_use":
            block["input"] = _input(text)
        else:
            block[self._open] = text
        self._open, self._parts = "", []
        return _event("content_block_stop", {"index": len(self._content) - 1})

    def _note_end(self, choice: Choice) -> None:
        reason, stop = choice.finish_reason, choice.stop_reason
        if reason is None:
            return
        if reason == "stop" and isinstance(stop, str):
            self._message |= {"stop_reason": "stop_sequence", "stop_sequence": stop}
        elif reason == "length":
            self._message["stop_reason"] = "max_tokens"
        else:  # a use of a tool that the model has spoilt is one as well: the client has to answer it
            used = any(block["type"] == "tool_use" for block in self._content)
            self._message["stop_reason"] = "tool_use" if used else "end_turn"


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return event_bytes(name, {"type": name, **fields})


def _tool_use(call: Call, name: str) -> dict[str, Any]:
    call_id = call.id or "toolu_" + uuid.uuid4().hex
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}, "caller": {"type": "direct"}}


def _input(arguments: str) -> Any:
    """The object that is written there, as it is written. What is none (cut off, or malformed) is told as
    a text, under the name that Anthropic has for it."""
    try:
        if isinstance(msgspec.json.decode(arguments or "{}"), dict):
            return msgspec.Raw((arguments or "{}").encode())
    except (msgspec.DecodeError, RecursionError):
        pass
    return {"INVALID_JSON": arguments}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what was cached apart from the rest of the input. Its SDKs' types have all fields."""
    cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": None,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": details and {"thinking_tokens": details.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }
