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

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTA: Final = ("stop_reason", "stop_sequence", "stop_details", "container")
_PING: Final = event_bytes("ping", {"type": "ping"})
_EMPTY: Final[dict[str, dict[str, Any]]] = {
    "text": {"type": "text", "text": "", "citations": None},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessageTranslation:
    """One `/v1/messages` request and its answer."""

    def __init__(self, chat: ChatRequest) -> None:
        self._chat = chat
        self._blocks = 0  # that were opened
        self._open = ""  # the open one's type
        self._begun = False
        self._message: dict[str, Any] = {
            "id": "msg_" + uuid.uuid4().hex,
            "type": "message",
            "role": "assistant",
            "model": chat.model,
            "content": [],
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
        return begin + b"".join([self._more(choice) for choice in chunk.choices])

    def done(self) -> bytes:
        """The events at the end."""
        message = self._message
        delta = {name: message[name] for name in _DELTA}
        told = _event("message_delta", {"delta": delta, "usage": message["usage"]})
        return self._close() + told + _event("message_stop", {})

    def failed(self, error: ErrorObject) -> bytes:
        """An error event, after which nothing comes."""
        told = APIError(500, error.message, code=error.code)
        return b"event: error\ndata: " + told.anthropic_body() + b"\n\n"

    def waiting(self) -> bytes:
        """A ping, once the message has begun."""
        return _PING

    def whole(self, answer: Chunk) -> bytes:
        """The message."""
        message, content = self._message, self._message["content"]
        for choice in answer.choices:
            self._note_end(choice)
            part = choice.message or Part()
            if part.reasoning_content:
                content.append(_EMPTY["thinking"] | {"thinking": part.reasoning_content})
            if part.content:
                content.append(_EMPTY["text"] | {"text": part.content})
            content += [_whole_call(call) for call in part.tool_calls or ()]
        message["usage"] = _usage(answer.usage or Usage())
        return msgspec.json.encode(message)

    def _more(self, choice: Choice) -> bytes:
        self._note_end(choice)
        part, out = choice.delta or Part(), b""
        if part.reasoning_content:
            out += self._block("thinking", _EMPTY["thinking"])
            out += self._delta({"type": "thinking_delta", "thinking": part.reasoning_content})
        if part.content:
            out += self._block("text", _EMPTY["text"])
            out += self._delta({"type": "text_delta", "text": part.content})
        for call in part.tool_calls or ():
            if call.function.name is not None:
                out += self._close() + self._block("tool_use", _tool_use(call, {}))
            if call.function.arguments:
                out += self._delta({"type": "input_json_delta", "partial_json": call.function.arguments})
        return out

    def _block(self, kind: str, block: dict[str, Any]) -> bytes:
        """What it takes that a block of this type is open."""
        if self._open == kind:
            return b""
        before = self._close()
        self._open = kind
        self._blocks += 1
        fields = {"index": self._blocks - 1, "content_block": block}
        return before + _event("content_block_start", fields)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._blocks - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", {"index": self._blocks - 1})

    def _note_end(self, choice: Choice) -> None:
        if choice.finish_reason is None:
            return
        reason, stop = _STOP_REASONS.get(choice.finish_reason, "end_turn"), choice.stop_reason
        if reason == "end_turn" and isinstance(stop, str):
            self._message |= {"stop_reason": "stop_sequence", "stop_sequence": stop}
        else:
            self._message["stop_reason"] = reason


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return event_bytes(name, {"type": name, **fields})


def _tool_use(call: Call, arguments: dict[str, Any]) -> dict[str, Any]:
    call_id = call.id or "toolu_" + uuid.uuid4().hex
    use = {"type": "tool_use", "id": call_id, "name": call.function.name or "", "input": arguments}
    return use | {"caller": {"type": "direct"}}


def _whole_call(call: Call) -> dict[str, Any]:
    """A use of a tool; arguments that were cut off have no value that could be given, so they are empty."""
    try:
        value = msgspec.json.decode(call.function.arguments or "{}")
    except msgspec.DecodeError:
        value = {}
    return _tool_use(call, value if isinstance(value, dict) else {})


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
