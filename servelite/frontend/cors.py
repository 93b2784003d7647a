"""Cross-origin requests: which web pages' scripts may read the answers (`--allowed-origins`)."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final

from servelite.frontend.body import ASGIApp, Message, Receive, Scope, Send

_METHODS: Final = b"GET, POST"
_EXPOSED: Final = b"x-request-id, request-id, retry-after"  # what a script may read besides the plain headers
_MAX_AGE_S: Final = b"600"  # how long a browser remembers a preflight's answer


class CrossOrigin:
    """Answers browsers' preflights, and marks the answers to allowed origins.

    It stands outside the key check: a preflight has no key, and a refusal has to be readable. Keys are
    sent in a header that scripts set themselves, so credentials (cookies) are never allowed. An origin
    that is not allowed is served without the mark, as without this: its browser hides the answer.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        """`origins`: as browsers send them (`https://chat.example`), or `*` for all."""
        self._app = app
        self._all = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = None
        if scope["type"] == "http":
            origin = _header(scope, b"origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        marks = self._marks(origin)
        if scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method") is not None:
            if len(marks) > 1:
                marks += [
                    (b"access-control-allow-methods", _METHODS),
                    (
                        b"access-control-allow-headers",
                        _header(scope, b"access-control-request-headers") or b"*",
                    ),
                    (b"access-control-max-age", _MAX_AGE_S),
                ]
            await send({"type": "http.response.start", "status": 204, "headers": marks})
            await send({"type": "http.response.body", "body": b""})
            return

        def marking(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *marks]
            return send(message)

        await self._app(scope, receive, marking)

    def _marks(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        """The headers that an answer to `origin` gets; the first tells caches what it depends on."""
        marks = [(b"vary", b"Origin")]
        if self._all or origin in self._origins:
            marks += [
                (b"access-control-allow-origin", b"*" if self._all else origin),
                (b"access-control-expose-headers", _EXPOSED),
            ]
        return marks


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
