"""A chat's answer as a Responses object, whole or as the events of its making.

The object's output is a list of items: reasoning, messages, function calls. One item is open at a
time; what comes next of another kind closes it. Events are numbered from 0.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from servelite.frontend.chunks import Translation, Usage
from servelite.frontend.errors import APIError
from servelite.frontend.logprobs import Logprobs
from servelite.frontend.parsers.events import Arguments, CallStart, Content, Event, Reasoning
from servelite.frontend.protocol import ChatRequest
from servelite.frontend.responses import output
from servelite.frontend.responses.output import CallItem, CustomCallItem, TextItem, event
from servelite.frontend.responses.tools import Tool

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


class _Entries(msgspec.Struct):
    """A chat's `logprobs`."""

    content: list[msgspec.Raw]


_decode_entries: Final = msgspec.json.Decoder(_Entries).decode


class ResponseTranslation(Translation):
    """One `/v1/responses` request and its answer."""

    def __init__(self, chat: ChatRequest, repeated: dict[str, Any], tools: Iterable[Tool]) -> None:
        """`repeated`: fields of the request that the object repeats."""
        self.chat = chat
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
        self._open: TextItem | CallItem | None = None
        self._cut = False  # by the length that it may have
        self._logprobs: list[msgspec.Raw] = []  # of tokens whose text is still to come

    def note_usage(self, usage: Usage) -> None:
        """It is told at the end alone."""

    def first(self, prompt_token_ids: Sequence[int] | None) -> bytes:
        return self._numbered([self._state("created"), self._state("in_progress")])

    def text(self, text: str) -> bytes:
        return self._numbered(self._text("message", text))

    def event(self, event: Event) -> bytes:
        if isinstance(event, Content):
            return self._numbered(self._text("message", event.text))
        if isinstance(event, Arguments):
            assert isinstance(self._open, CallItem)
            return self._numbered(self._open.more(event.text))
        if isinstance(event, Reasoning):
            return self._numbered(self._text("reasoning", event.text))
        return self._numbered(self._call(event)) if isinstance(event, CallStart) else b""

    def rich(self, piece: str | Event, logprobs: Logprobs | None, more: dict[str, Any]) -> bytes:
        if not isinstance(piece, (str, Content)):
            return self.event(piece)
        text = piece if isinstance(piece, str) else piece.text
        if isinstance(logprobs, bytes):
            self._logprobs += _decode_entries(logprobs).content
        if text or (isinstance(self._open, TextItem) and self._open.kind == "message"):
            return self.text(text)
        return b""

    def finish(self, reason: str, stop_reason: str | int | None) -> bytes:
        self._cut = reason == "length"
        return b""

    def done(self, usage: Usage) -> bytes:
        """The open item's events, and the whole object. There is always an item: an empty message."""
        events: list[output.Event] = []
        if self._open is None and not self._output:
            self._open = item = TextItem("message", 0)
            events += item.begin()
        status = "incomplete" if self._cut else "completed"
        events += self._close(status)
        self._object |= {"status": status, "usage": _usage(usage)}
        if self._cut:
            self._object["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._object["completed_at"] = int(time.time())
        return self._numbered([*events, self._state(status)])

    def failed(self, error: APIError) -> bytes:
        """What there is so far, and why there is no more. The open item ends without a word of its own."""
        if self._open is not None:
            self._output.append(self._open.finish("incomplete")[1])
        told = {"code": "server_error", "message": error.message}
        self._object |= {"status": "failed", "error": told}
        return self._numbered([self._state("failed")])

    def whole(self) -> bytes:
        return msgspec.json.encode(self._object)

    def _text(self, kind: str, text: str) -> list[output.Event]:
        item, events = self._open, list[output.Event]()
        if not (isinstance(item, TextItem) and item.kind == kind):
            events = self._close("completed")
            self._open = item = TextItem(kind, len(self._output))
            events += item.begin()
        if kind == "reasoning":
            return [*events, item.more(text, [])]
        logprobs, self._logprobs = self._logprobs, []
        return [*events, item.more(text, logprobs)]

    def _call(self, call: CallStart) -> list[output.Event]:
        events = self._close("completed")
        tool = self._tools.get(call.name, Tool("function", call.name, None, {}, ""))
        made = CustomCallItem if tool.kind == "custom" else CallItem
        self._open = item = made(len(self._output), call.call_id, tool.name, tool.namespace)
        return events + item.begin()

    def _close(self, status: str) -> list[output.Event]:
        if self._open is None:
            return []
        events, item = self._open.finish(status)
        self._output.append(item)
        self._open = None
        return events

    def _state(self, status: str) -> output.Event:
        return event(f"response.{status}", {"response": self._object})

    def _numbered(self, events: list[output.Event]) -> bytes:
        out = b""
        for before, after in events:
            out += b"%b%d%b" % (before, self._sequence, after)
            self._sequence += 1
        return out


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
