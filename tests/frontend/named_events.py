"""Server-sent events that have names, as `/v1/responses` and `/v1/messages` send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from servelite.frontend.chunks import Translation, Usage
from servelite.frontend.parsers.events import Arguments, CallStart, Content, Event, Reasoning


def read_events(data: bytes) -> list[dict[str, Any]]:
    """The events; each one's name is its data's type, and nothing but events is there."""
    events = []
    *blocks, rest = data.decode().split("\n\n")
    assert rest == ""
    for block in blocks:
        if block.startswith(":"):
            continue
        name, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def types_of(events: list[dict[str, Any]]) -> list[str]:
    """Their types, in order; a run of one type is told once."""
    types = [event["type"] for event in events]
    return [name for i, name in enumerate(types) if i == 0 or types[i - 1] != name]


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chat's chunk."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def call(index: int, arguments: str, call_id: str | None = None, name: str | None = None) -> dict[str, Any]:
    """A chunk's `tool_calls`: a call's beginning, or more of one."""
    begun = {"id": call_id, "type": "function"} if call_id else {}
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": index, "function": function} | begun]}


def answered(translation: Translation, chunks: list[dict[str, Any]]) -> bytes:
    """The whole stream of an answer with these chunks."""
    translation.note_usage(Usage(0, 0))
    out, usage = translation.first(None), Usage(0, 0)
    for chunk in chunks:
        usage = chunk.get("usage", usage)
        for choice in chunk["choices"]:
            for event in events_of(choice["delta"]):
                out += translation.rich(event, choice.get("logprobs"), {})
            if choice["finish_reason"]:
                out += translation.finish(choice["finish_reason"], None)
    return out + translation.done(usage)


def events_of(part: dict[str, Any]) -> Iterator[Event]:
    """What a parser tells for more of a message."""
    if "reasoning_content" in part:
        yield Reasoning(part["reasoning_content"])
    if part.get("content"):
        yield Content(part["content"])
    for one in part.get("tool_calls", ()):
        if "id" in one:
            yield CallStart(one["index"], one["id"], one["function"]["name"])
        if one["function"]["arguments"]:
            yield Arguments(one["index"], one["function"]["arguments"])


def streamed(translation: Translation, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a stream with these chunks."""
    return read_events(answered(translation, chunks))


def collected(translation: Translation, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer with these chunks."""
    answered(translation, chunks)
    answer: dict[str, Any] = json.loads(translation.whole())
    return answer
