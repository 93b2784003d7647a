"""A strict reader of server-sent events: what a stream may hold, and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


class FramingError(AssertionError):
    """Bytes that no stream of this API may have."""


def strict_json(text: str | bytes) -> Any:
    """JSON without the NaN and Infinity that Python's reader takes; raises ValueError for them."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass
class Events:
    """A whole stream, taken apart."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    done: bool = False

    @property
    def error(self) -> dict[str, Any] | None:
        """Of the event that says that the stream failed."""
        return next((chunk["error"] for chunk in self.chunks if "error" in chunk), None)


def read_events(data: bytes) -> Events:
    """Take a stream apart; raises `FramingError` for what is not framed as it must be."""
    events = Events()
    *blocks, rest = data.split(b"\n\n")
    if rest:
        raise FramingError(f"the stream does not end with a blank line: {rest[-80:]!r}")
    for block in blocks:
        _read_event(events, block)
    if not events.done and events.error is None:
        raise FramingError("the stream ends with neither [DONE] nor an error")
    return events


def _read_event(events: Events, block: bytes) -> None:
    try:
        line = block.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FramingError(f"an event is not UTF-8 by itself: {block[:80]!r}") from error
    if "\n" in line or "\r" in line:
        raise FramingError(f"an event of several lines: {line[:80]!r}")
    if line.startswith(":"):
        events.comments.append(line)
        return
    if events.done:
        raise FramingError(f"an event after [DONE]: {line[:80]!r}")
    if not line.startswith("data: "):
        raise FramingError(f"a line that is neither data nor comment: {line[:80]!r}")
    payload = line.removeprefix("data: ")
    if payload == "[DONE]":
        if events.error is not None:
            raise FramingError("[DONE] after an error: a failed answer is not done")
        events.done = True
        return
    try:
        chunk = strict_json(payload)
    except ValueError as error:
        raise FramingError(f"a data line that is not JSON: {payload[:80]!r}") from error
    if not isinstance(chunk, dict):
        raise FramingError(f"a data line that is no object: {payload[:80]!r}")
    events.chunks.append(chunk)
