"""Streams of every API that are read to their end and put together again, to be compared with an undisturbed
run's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.http.client import connected


@dataclass
class Told:
    """All that a client was told in one stream.

    Attributes:
        parts: each text that came in pieces, by what it is of: a choice's content, a call's arguments.
    """

    text: str = ""
    parts: dict[str, str] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    events: int = 0  # of a response, which numbers them

    def same(self, other: Told, tolerance: float = 0.0) -> bool:
        """Equal, log probabilities within `tolerance`."""
        close = len(self.logprobs) == len(other.logprobs) and all(
            abs(a - b) <= tolerance for a, b in zip(self.logprobs, other.logprobs, strict=True)
        )
        return close and all(
            getattr(self, name) == getattr(other, name)
            for name in ("text", "parts", "token_ids", "finish_reason", "usage", "error", "done")
        )

    def add(self, part: str, text: str | None) -> None:
        """More of a part."""
        if text:
            self.parts[part] = self.parts.get(part, "") + text


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def stream(
    port: int,
    body: dict[str, Any],
    seen: Callable[[Told], object] = id,
    path: str = COMPLETIONS,
) -> Told:
    """One streamed answer, to its end; `seen` is called after each event with what came so far."""
    told = Told()
    extra: dict[str, Any] = {"stream": True}
    if path in (COMPLETIONS, CHAT):
        extra |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    take = {"/v1/responses": _take_response, "/v1/messages": _take_message}.get(path, _take_chunk)
    async with connected(port) as connection:
        await connection.send(path, body | extra)
        status, headers = await connection.head()
        assert status == 200, status
        assert "text/event-stream" in headers["content-type"]
        rest = b""
        async for chunk in connection.chunks():
            rest += chunk
            *events, rest = rest.split(b"\n\n")
            for event in events:
                if not event.startswith(b":"):  # a comment that keeps the connection open
                    assert not told.done
                    take(told, event[event.index(b"data: ") + 6 :])
                    seen(told)
    return told


def _take_chunk(told: Told, data: bytes) -> None:
    """OpenAI's, of a chat or of a completion."""
    if data == b"[DONE]":
        told.done = True
        return
    chunk = json.loads(data)
    if "error" in chunk:
        told.error = chunk["error"]
        return
    if chunk.get("usage") is not None:
        told.usage = chunk["usage"]
    for choice in chunk["choices"]:
        delta, number = choice.get("delta", {}), choice["index"]
        text = choice.get("text") or delta.get("content") or ""
        told.text += text
        told.add(f"{number} content", text)
        told.add(f"{number} reasoning", delta.get("reasoning_content"))
        for call in delta.get("tool_calls", ()):
            told.add(f"{number} name {call['index']}", call["function"].get("name"))
            told.add(f"{number} arguments {call['index']}", call["function"].get("arguments"))
        told.token_ids += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        told.logprobs += logprobs.get("token_logprobs") or []
        told.logprobs += [entry["logprob"] for entry in logprobs.get("content") or ()]
        told.finish_reason = choice["finish_reason"] or told.finish_reason


def _take_response(told: Told, data: bytes) -> None:
    """Of `/v1/responses`: what the deltas add up to, and that the whole response at the end says the same."""
    event = json.loads(data)
    assert event["sequence_number"] == told.events, event
    told.events += 1
    kind, index = event["type"], event.get("output_index")
    if kind.endswith(".delta"):
        told.add(f"{index} {kind}", event["delta"])
    elif kind == "response.output_item.added":
        told.add(f"{index} name", event["item"].get("name", event["item"]["type"]))
    elif kind in ("response.completed", "response.incomplete", "response.failed"):
        response = event["response"]
        told.finish_reason, told.done = response["status"], True
        told.error = response["error"]
        told.usage = {"completion_tokens": response["usage"]["output_tokens"]}
        for index, item in enumerate(response["output"]):
            whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            (text,) = (text for part, text in told.parts.items() if part.startswith(f"{index} response."))
            assert whole == text


def _take_message(told: Told, data: bytes) -> None:
    """Of `/v1/messages`."""
    event = json.loads(data)
    match event["type"]:
        case "content_block_start":
            block = event["content_block"]
            told.add(f"{event['index']} name", block.get("name", block["type"]))
        case "content_block_delta":
            (text,) = (text for name, text in event["delta"].items() if name != "type")
            told.add(f"{event['index']} {event['delta']['type']}", text)
        case "message_delta":
            told.finish_reason = event["delta"]["stop_reason"]
            told.usage = {"completion_tokens": event["usage"]["output_tokens"]}
        case "message_stop":
            told.done = True
        case "error":
            told.error = event["error"]


async def all_streams(port: int, bodies: list[dict[str, Any]]) -> list[asyncio.Task[Told]]:
    """Start them all; returns when each has had a token."""
    begun = [asyncio.Event() for _ in bodies]
    tasks = [
        asyncio.create_task(stream(port, body, lambda told, event=event: told.token_ids and event.set()))
        for body, event in zip(bodies, begun, strict=True)
    ]
    for task, event in zip(tasks, begun, strict=True):
        first = asyncio.create_task(event.wait())
        await asyncio.wait({first, task}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        first.cancel()
    return tasks
