"""Pure ASGI middleware: a request ID in and out, the API key, request bodies that nobody read."""

from __future__ import annotations

import asyncio
import hmac
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from servelite.frontend.body import ASGIApp, Message, Receive, Scope, Send, send_error
from servelite.frontend.errors import is_anthropic, unauthorized
from servelite.observability.logs import REQUEST_ID

_HEADER: Final = b"x-request-id"
_ANTHROPICS: Final = b"request-id"  # the header's name in that API
_ACCEPTED: Final = re.compile(rb"[\x21-\x7e]{1,128}")
OPEN_PATHS: Final = frozenset(("/health", "/health/live", "/health/ready"))
"""What a balancer asks, which has no key."""

DISCARD_S: Final = 2.0  # for the rest of a body that is refused unread
DISCARD_BYTES: Final = 64 << 20  # of it that are read after an answer that ends the connection
_CLOSE: Final = (b"connection", b"close")


class RequestID:
    """Answers every request with its `X-Request-Id`: the client's own, or a new one. Routes of Anthropic's
    API tell it as `Request-Id` too.

    An ID that is no short printable word is replaced: it goes into headers, and into what this front
    end logs while it works on the request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        request_id = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex.encode()
        REQUEST_ID.set(request_id.decode())  # of this request's task, and of those it makes
        names = (_HEADER, _ANTHROPICS) if is_anthropic(scope["path"]) else (_HEADER,)
        told = [(name, request_id) for name in names]

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *told]
            return send(message)

        await self._app(scope, receive, send_with_id)


class BodyDiscard:
    """Reads to its end a body that is answered unread (a refusal), before the answer begins.

    uvicorn forgets a connection's idle time-out when a body's bytes come after the answer. A body that
    is too large or too slow ends the connection instead: then the answer goes out at once, and the rest
    is read after it, for a while, since closing with bytes unread would take the answer from the client.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        """`limit`: bytes."""
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        unread, closing = True, False

        async def receiving() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def starting(message: Message) -> None:
            nonlocal closing
            headers = list(message.get("headers", ()))
            if _CLOSE not in headers and not await self._discard(receiving, self._limit):
                headers.append(_CLOSE)
            closing = _CLOSE in headers
            message["headers"] = headers
            await send(message)

        async def ending(message: Message) -> None:
            await send({**message, "more_body": True})
            await self._discard(receiving, DISCARD_BYTES)
            await send({"type": "http.response.body", "body": b""})

        def sending(message: Message) -> Awaitable[None]:
            if unread and message["type"] == "http.response.start":
                return starting(message)
            if closing and unread and not message.get("more_body", False):
                return ending(message)
            return send(message)

        await self._app(scope, receiving, sending)

    async def _discard(self, receive: Receive, limit: int) -> bool:
        """Whether the end was reached within `limit` bytes."""
        size = 0
        try:
            async with asyncio.timeout(DISCARD_S):
                while size <= limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    size += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            pass
        return False


class KeyCheck:
    """Answers 401 unless `Authorization: Bearer` (or Anthropic's `X-Api-Key`) has one of the keys.

    Every path is guarded but the health probes, those too that do not exist.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], refused: Callable[[str], None]) -> None:
        """`refused` is told the code of each refusal."""
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        error = unauthorized()
        self._refused(error.code or "")
        await send_error(send, error, scope["path"])

    def _knows(self, scope: Scope) -> bool:
        headers = dict(reversed(scope["headers"]))  # of several alike the first counts
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [bearer.strip()] if scheme.lower() == b"bearer" else []
        given.append(headers.get(b"x-api-key", b""))
        # Every key is compared to its end: the time taken tells nothing about any of them.
        matches = [hmac.compare_digest(one, key) for one in given for key in self._keys]
        return any(matches)
