"""A chat's answer as a Responses object, whole or as the events of its making.

The object's output is a list of items: reasoning, messages, function calls. One item is open at a
time; what comes next of another kind closes it. Events are numbered from 0.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from servelite.frontend.chunks import WAITING
from servelite.frontend.protocol import ChatRequest
from servelite.frontend.responses.output import CallItem, CustomCallItem, Event, Item, TextItem
from servelite.frontend.responses.tools import Tool
from servelite.frontend.translated import Call, Choice, Chunk, ErrorObject, Part, Usage, event_bytes

_ALWAYS: Final = {
    "object": "response",
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
    "user": None,
}


class ResponseTranslation:
    """One `/v1/responses` request and its answer."""

    def __init__(self, chat: ChatRequest, repeated: dict[str, Any], tools: Iterable[Tool]) -> None:
        """`repeated`: fields of the request that the object repeats."""
        self._chat = chat
        self._tools = {tool.function["name"]: tool for tool in tools}
        self._output: list[dict[str, Any]] = []
        self._object: dict[str, Any] = {
            "id": "resp_" + uuid.uuid4().hex,
            **_ALWAYS,
            **repeated,
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "usage": None,
        }
        self._sequence = 0
        self._open: Item | None = None
        self._cut = False  # by the length that it may have
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is still to come

    @property
    def chat(self) -> ChatRequest:
        """The request in terms of a chat."""
        return self._chat

    def chunk(self, chunk: Chunk) -> bytes:
        """The events for one of the chat's."""
        events = [] if self._sequence else [self._state("created"), self._state("in_progress")]
        if chunk.usage is not None:
            self._object["usage"] = _usage(chunk.usage)
        for choice in chunk.choices:
            events += self._take(choice, choice.delta)
        return self._numbered(events)

    def done(self) -> bytes:
        """The events at the end: the open item's, and the whole object."""
        return self._numbered([*self._complete(), self._state(self._object["status"])])

    def failed(self, error: ErrorObject) -> bytes:
        """What there is so far, and why there is no more. The open item ends without a word of its own."""
        if self._open is not None:
            self._output.append(self._open.finish("incomplete")[1])
        told = {"code": "server_error", "message": error.message}
        self._object |= {"status": "failed", "error": told}
        return self._numbered([self._state("failed")])

    def waiting(self) -> bytes:
        """A comment."""
        return WAITING

    def whole(self) -> bytes:
        """The object, made as its stream would be."""
        self._complete()
        return msgspec.json.encode(self._object)

    def _take(self, choice: Choice, part: Part | None) -> list[Event]:
        """What there is to tell of more of the answer."""
        self._cut = self._cut or choice.finish_reason == "length"
        if part is None:
            return []
        events: list[Event] = []
        if part.reasoning_content:
            events += self._text("reasoning", part.reasoning_content, [])
        if choice.logprobs is not None and part.content is not None:
            self._logprobs += choice.logprobs.content or ()
        is_message = isinstance(self._open, TextItem) and self._open.kind == "message"
        if part.content or (self._logprobs and is_message):
            events += self._text("message", part.content or "", self._logprobs)
            self._logprobs = []
        for call in part.tool_calls or ():
            events += self._call(call)
        return events

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        item = self._open
        if isinstance(item, TextItem) and item.kind == kind:
            return [item.more(text, logprobs)]
        events = self._close("completed")
        self._open = item = TextItem(kind, len(self._output))
        return [*events, *item.begin(), item.more(text, logprobs)]

    def _call(self, call: Call) -> list[Event]:
        item, events = self._open, list[Event]()
        if call.function.name is not None or not isinstance(item, CallItem):
            events = self._close("completed")
            name = call.function.name or ""
            tool = self._tools.get(name, Tool("function", name, None, {}, ""))
            made = CustomCallItem if tool.kind == "custom" else CallItem
            call_id = call.id or "call_" + uuid.uuid4().hex
            self._open = item = made(len(self._output), call_id, tool.name, tool.namespace)
            events += item.begin()
        if call.function.arguments:
            events += item.more(call.function.arguments)
        return events

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        events, item = self._open.finish(status)
        self._output.append(item)
        self._open = None
        return events

    def _complete(self) -> list[Event]:
        """Close what is open and say how the whole ended. There is always an item: an empty message."""
        events: list[Event] = []
        if self._open is None and not self._output:
            self._open = item = TextItem("message", 0)
            events += item.begin()
        status = "incomplete" if self._cut else "completed"
        events += self._close(status)
        self._object["status"] = status
        if self._cut:
            self._object["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._object["completed_at"] = int(time.time())
        return events

    def _state(self, status: str) -> Event:
        return f"response.{status}", {"response": self._object}

    def _numbered(self, events: list[Event]) -> bytes:
        out = b""
        for name, fields in events:
            out += event_bytes(name, {"type": name, "sequence_number": self._sequence, **fields})
            self._sequence += 1
        return out


def _usage(usage: Usage) -> dict[str, Any]:
    details = usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": details.reasoning_tokens if details else 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
