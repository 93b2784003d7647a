"""The items of a Responses object's output while they are made: what is told of each, and the item itself."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any, Final

import msgspec

from servelite.frontend.responses.tools import TEXT

Event = tuple[bytes, bytes]
"""What stands before its number, and what after it."""

_encode: Final = msgspec.json.encode
_OPENING: Final = re.compile(rf'\s*\{{\s*"{TEXT}"\s*:\s*"')  # of a custom tool's arguments
_CHARACTERS: Final = re.compile(  # of a JSON string: whole ones, no half of a pair whose other may follow
    r"""(?:[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"""
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*"
)


def event(name: str, fields: dict[str, Any]) -> Event:
    """`fields`: all but type and number."""
    kind = name.encode()
    before = b'event: %b\ndata: {"type":"%b","sequence_number":' % (kind, kind)
    return before, b"," + _encode(fields)[1:] + b"\n\n"


def _delta(name: str, place: dict[str, Any]) -> Event:
    """An event, up to its `delta`."""
    before, after = event(name, place)
    return before, after.removesuffix(b"}\n\n") + b',"delta":'


class TextItem:
    """The answer's text, or the reasoning before it: an item with one part."""

    def __init__(self, kind: str, index: int) -> None:
        """`kind`: message or reasoning; `index`: its place in the output."""
        self.kind = kind
        self._text: list[str] = []
        self._logprobs: list[msgspec.Raw] = []
        self._id = ("msg_" if kind == "message" else "rs_") + uuid.uuid4().hex
        self._place = {"output_index": index, "item_id": self._id, "content_index": 0}
        self._name = "response.output_text" if kind == "message" else "response.reasoning_text"
        self._before, self._delta = _delta(f"{self._name}.delta", self._place)

    def begin(self) -> list[Event]:
        """What is told before anything of it."""
        place = self._place
        return [
            event("response.output_item.added", _added(place, self._item("in_progress", []))),
            event("response.content_part.added", place | {"part": self._part("", [])}),
        ]

    def more(self, text: str, logprobs: list[msgspec.Raw]) -> Event:
        """More of its text, and of that the tokens' log probabilities."""
        self._text.append(text)
        after = self._delta + _encode(text)
        if self.kind == "message":
            self._logprobs += logprobs
            after += b',"logprobs":' + _encode(logprobs)
        return self._before, after + b"}\n\n"

    def finish(self, status: str) -> tuple[list[Event], dict[str, Any]]:
        """What is told after all of it, and the whole item; `status`: completed or incomplete."""
        place, text = self._place, "".join(self._text)
        part = self._part(text, self._logprobs)
        item = self._item(status, [part])
        done = place | {"text": text} | ({"logprobs": self._logprobs} if self.kind == "message" else {})
        events = [
            event(f"{self._name}.done", done),
            event("response.content_part.done", place | {"part": part}),
            event("response.output_item.done", _added(place, item)),
        ]
        return events, item

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id, "type": self.kind, "status": status, "content": content}
        more: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return item | more

    def _part(self, text: str, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class CallItem:
    """A function call. Its arguments are told as they come; it is complete if they are a JSON object."""

    kind = "function_call"
    text = "arguments"  # the field with what the model wrote
    told = "response.function_call_arguments"

    def __init__(self, index: int, call_id: str, name: str, namespace: str | None) -> None:
        """`index`: its place in the output."""
        self._arguments: list[str] = []
        self._id = ("fc_" if self.kind == "function_call" else "ctc_") + uuid.uuid4().hex
        self._place = {"output_index": index, "item_id": self._id}
        self._called = {"call_id": call_id, "name": name} | ({"namespace": namespace} if namespace else {})
        self._before, self._delta = _delta(f"{self.told}.delta", self._place)

    def begin(self) -> list[Event]:
        """As `TextItem.begin`."""
        return [event("response.output_item.added", _added(self._place, self._item("in_progress", "")))]

    def more(self, arguments: str) -> list[Event]:
        """More of its arguments' JSON text."""
        self._arguments.append(arguments)
        return [(self._before, self._delta + _encode(arguments) + b"}\n\n")]

    def finish(self, status: str) -> tuple[list[Event], dict[str, Any]]:
        """As `TextItem.finish`."""
        arguments = "".join(self._arguments)
        item = self._item("incomplete" if _object(arguments) is None else "completed", arguments)
        done = self._place | {"name": self._called["name"], "arguments": arguments}
        events = [
            event(f"{self.told}.done", done),
            event("response.output_item.done", _added(self._place, item)),
        ]
        return events, item

    def _item(self, status: str, text: str) -> dict[str, Any]:
        return {"id": self._id, "type": self.kind, "status": status, self.text: text} | self._called


class CustomCallItem(CallItem):
    """A custom tool's call. Its input is told as it comes, if the arguments begin with it; where they have
    none, their text stands in its place."""

    kind = "custom_tool_call"
    text = "input"
    told = "response.custom_tool_call_input"

    def __init__(self, index: int, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(index, call_id, name, namespace)
        self._begun = False
        self._unread = ""
        self._input: list[str] = []

    def more(self, arguments: str) -> list[Event]:
        self._arguments.append(arguments)
        self._unread += arguments
        if not self._begun and (opening := _OPENING.match(self._unread)) is not None:
            self._begun, self._unread = True, self._unread[opening.end() :]
        found = _CHARACTERS.match(self._unread) if self._begun else None
        if not found or not found[0]:
            return []
        self._unread = self._unread[found.end() :]
        return self._told(json.loads(f'"{found[0]}"', strict=False))

    def finish(self, status: str) -> tuple[list[Event], dict[str, Any]]:
        arguments = "".join(self._arguments)
        given = (_object(arguments) or {}).get(TEXT)
        events = [] if self._begun else self._told(given if isinstance(given, str) else arguments)
        item = self._item("completed" if isinstance(given, str) else "incomplete", "".join(self._input))
        events += [
            event(f"{self.told}.done", self._place | {"input": item["input"]}),
            event("response.output_item.done", _added(self._place, item)),
        ]
        return events, item

    def _told(self, text: str) -> list[Event]:
        """More of the input; halves of surrogate pairs, which have no UTF-8, become question marks."""
        text = text.encode(errors="replace").decode()
        self._input.append(text)
        return [(self._before, self._delta + _encode(text) + b"}\n\n")]


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _added(place: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    return {"output_index": place["output_index"], "item": item}
