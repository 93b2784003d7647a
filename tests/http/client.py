"""A small asynchronous HTTP client: hundreds of requests at once from one thread, connections reused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def post(self, path: str, body: Any) -> Reply:
        """Send a body (bytes as they are, anything else as JSON) and read the whole answer."""
        await self.send(path, body)
        return await self.reply()

    async def send(self, path: str, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._writer.write(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        )
        await self._writer.drain()

    async def reply(self) -> Reply:
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            return Reply(status, headers, b"".join([chunk async for chunk in self.chunks()]))
        length = int(headers["content-length"])
        return Reply(status, headers, await self._reader.readexactly(length))

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers."""
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in pairs}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The parts of a chunked body as they come."""
        while size := int(await self._reader.readline(), 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)

    def close(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    """A connection to a server of this machine."""
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 24))
    try:
        yield connection
    finally:
        connection.close()
