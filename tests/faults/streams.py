"""Streams that are read to their end and put together again, to be compared with an undisturbed run's."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from tests.http.client import connected


@dataclass
class Told:
    """All that a client was told of one completion."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False

    def same(self, other: Told, tolerance: float = 0.0) -> bool:
        """Equal, log probabilities within `tolerance`."""
        close = len(self.logprobs) == len(other.logprobs) and all(
            abs(a - b) <= tolerance for a, b in zip(self.logprobs, other.logprobs, strict=True)
        )
        return close and all(
            getattr(self, name) == getattr(other, name)
            for name in ("text", "token_ids", "finish_reason", "usage", "error", "done")
        )


async def stream(port: int, body: dict[str, Any], begun: asyncio.Event | None = None) -> Told:
    """One streamed completion, to its end; `begun` is set at its first text."""
    told = Told()
    extra = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    async with connected(port) as connection:
        await connection.send("/v1/completions", body | extra)
        status, headers = await connection.head()
        assert status == 200, status
        assert "text/event-stream" in headers["content-type"]
        rest = b""
        async for chunk in connection.chunks():
            rest += chunk
            *events, rest = rest.split(b"\n\n")
            for event in events:
                _take(told, event)
            if begun is not None and told.token_ids:
                begun.set()
    return told


def _take(told: Told, event: bytes) -> None:
    if event.startswith(b":"):
        return  # a comment that keeps the connection open
    data = event.removeprefix(b"data: ")
    assert not told.done
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
        told.text += choice["text"]
        told.token_ids += choice.get("token_ids") or []
        if (choice.get("logprobs") or {}).get("token_logprobs"):
            told.logprobs += choice["logprobs"]["token_logprobs"]
        told.finish_reason = choice["finish_reason"] or told.finish_reason


async def all_streams(port: int, bodies: list[dict[str, Any]]) -> list[asyncio.Task[Told]]:
    """Start them all; returns when each has had a token."""
    begun = [asyncio.Event() for _ in bodies]
    tasks = [
        asyncio.create_task(stream(port, body, event)) for body, event in zip(bodies, begun, strict=True)
    ]
    for task, event in zip(tasks, begun, strict=True):
        first = asyncio.create_task(event.wait())
        await asyncio.wait({first, task}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        first.cancel()
    return tasks
