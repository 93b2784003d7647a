"""A client that speaks ASGI to the app directly: no sockets, and it can vanish at will."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import FastAPI


class Call:
    """One request under way."""

    def __init__(
        self,
        app: FastAPI,
        path: str,
        body: Any,
        headers: dict[str, str] | None = None,
        *,
        method: str = "",
    ) -> None:
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._asked = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.arrived = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method or ("GET" if body is None else "POST"),
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"" if self._body == b"null" else self._body}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        elif message.get("body"):
            self.parts.append(message["body"])
            self.arrived.set()

    def vanish(self) -> None:
        """Close the connection."""
        self._gone.set()

    async def done(self) -> Any:
        """The whole answer: JSON, or a stream's events ("[DONE]" stays a string)."""
        await asyncio.wait_for(self.task, 10)
        return self.read()

    def read(self) -> Any:
        """What came so far."""
        text = b"".join(self.parts).decode()
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            return [read_event(event) for event in text.split("\n\n") if event.startswith("data: ")]
        return json.loads(text)


def read_event(event: str) -> Any:
    """One SSE event's data."""
    data = event.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)
