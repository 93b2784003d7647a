"""Pure ASGI middleware: a request ID in and out."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

from servelite.frontend.body import Message, Receive, Scope, Send

_HEADER: Final = b"x-request-id"
_ACCEPTED: Final = re.compile(rb"[\x21-\x7e]{1,128}")

ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequestID:
    """Answers every request with its `X-Request-Id`: the client's own, or a new one.

    An ID that is no short printable word is replaced: it goes into headers and logs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        request_id = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex.encode()

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_HEADER, request_id)]
            return send(message)

        await self._app(scope, receive, send_with_id)
