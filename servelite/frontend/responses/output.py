"""The items of a Responses object's output while they are made: what is told of each, and the item itself."""

from __future__ import annotations

import uuid
from typing import Any, Protocol

Event = tuple[str, dict[str, Any]]
"""Its type, and its fields but for type and number."""


class Item(Protocol):
    """One item."""

    def begin(self) -> list[Event]:
        """What is told before anything of it."""
        ...

    def finish(self, status: str) -> tuple[list[Event], dict[str, Any]]:
        """What is told after all of it, and the whole item; `status`: completed or incomplete."""
        ...


class TextItem:
    """The answer's text, or the reasoning before it: an item with one part."""

    def __init__(self, kind: str, index: int) -> None:
        """`kind`: message or reasoning; `index`: its place in the output."""
        self.kind = kind
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._id = ("msg_" if kind == "message" else "rs_") + uuid.uuid4().hex
        self._place = {"output_index": index, "item_id": self._id, "content_index": 0}
        self._name = "response.output_text" if kind == "message" else "response.reasoning_text"

    def begin(self) -> list[Event]:
        place = self._place
        return [
            ("response.output_item.added", _added(place, self._item("in_progress", []))),
            ("response.content_part.added", place | {"part": self._part("", [])}),
        ]

    def more(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        """More of its text, and of that the tokens' log probabilities."""
        self._text.append(text)
        self._logprobs += logprobs
        fields = self._place | {"delta": text}
        return f"{self._name}.delta", fields | ({"logprobs": logprobs} if self.kind == "message" else {})

    def finish(self, status: str) -> tuple[list[Event], dict[str, Any]]:
        place, text = self._place, "".join(self._text)
        part = self._part(text, self._logprobs)
        item = self._item(status, [part])
        done = place | {"text": text} | ({"logprobs": self._logprobs} if self.kind == "message" else {})
        events = [
            (f"{self._name}.done", done),
            ("response.content_part.done", place | {"part": part}),
            ("response.output_item.done", _added(place, item)),
        ]
        return events, item

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id, "type": self.kind, "status": status, "content": content}
        more: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return item | more

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class CallItem:
    """A function call. Its arguments are told as they come."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        """`index`: its place in the output."""
        self._arguments: list[str] = []
        self._call_id = call_id
        self._function = name
        self._id = "fc_" + uuid.uuid4().hex
        self._place = {"output_index": index, "item_id": self._id}

    def begin(self) -> list[Event]:
        return [("response.output_item.added", _added(self._place, self._item("in_progress", "")))]

    def more(self, arguments: str) -> Event:
        """More of its arguments' JSON text."""
        self._arguments.append(arguments)
        return "response.function_call_arguments.delta", self._place | {"delta": arguments}

    def finish(self, status: str) -> tuple[list[Event], dict[str, Any]]:
        arguments = "".join(self._arguments)
        item = self._item(status, arguments)
        done = self._place | {"name": self._function, "arguments": arguments}
        events = [
            ("response.function_call_arguments.done", done),
            ("response.output_item.done", _added(self._place, item)),
        ]
        return events, item

    def _item(self, status: str, arguments: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._function,
            "arguments": arguments,
        }


def _added(place: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    return {"output_index": place["output_index"], "item": item}
