"""Server-sent events that have names, as `/v1/responses` and `/v1/messages` send them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from servelite.frontend.translated import Chunk, Translation


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


def streamed(translation: Translation, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a stream with these chunks."""
    out = b"".join([translation.chunk(msgspec.convert(chunk, Chunk)) for chunk in chunks])
    return read_events(out + translation.done())


def collected(translation: Translation, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer with these chunks."""
    for chunk in chunks:
        translation.chunk(msgspec.convert(chunk, Chunk))
    answer: dict[str, Any] = json.loads(translation.whole())
    return answer
