"""Request bodies and whole answers over raw ASGI: bounded reads, strict JSON, error bodies."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec

from servelite.frontend.errors import APIError, bad_request

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

DIRECT_SEND: Final = "servelite.send"
"""In a scope: the server's own `send`. For what comes between an answer's head and its end, in which no
middleware has an interest: the way through all of them is a tenth of what a streamed token costs."""

_ESCAPES: Final = re.compile(  # up to the first half of a surrogate pair that stands alone
    rb"(?:[^\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(?!u[dD][89a-fA-F])[\s\S])*+"
)
_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_NUMBER: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"|(-?[0-9][-+.0-9eE]*+)', re.DOTALL)  # but within texts

JSON: Final = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The client closed the connection: nobody waits for the answer."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body.

    Raises:
        APIError: 413, it is over `limit` bytes (told from Content-Length before reading, if it is there);
            415, its headers say that it is no plain UTF-8 JSON.
        ClientGone: the connection ended first.
    """
    _check_media(scope)
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_media(scope: Scope) -> None:
    """Raises for a Content-Type or Content-Encoding that cannot be served; absent, both are right."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise _unsupported("Content-Encoding", value, "send the body uncompressed")
        if name == b"content-type" and not _is_json(value.decode("latin-1")):
            raise _unsupported("Content-Type", value, "send application/json in UTF-8")


def _is_json(content_type: str) -> bool:
    """A charset, if there is one, is UTF-8 or a part of it; other parameters say nothing that matters."""
    kind, *parameters = content_type.lower().split(";")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8", "us-ascii"):
            return False
    return kind.strip() in ("", "application/json")


def _unsupported(header: str, value: bytes, advice: str) -> APIError:
    text = value[:60].decode("latin-1")
    return APIError(
        415, f"{header} is {text!r}, which is not supported: {advice}.", code="unsupported_media_type"
    )


def _too_large(limit: int) -> APIError:
    # The unread rest of the body would be taken for the next request: the connection ends here.
    return APIError(
        413,
        f"The request body is larger than {limit} bytes.",
        code="body_too_large",
        headers=(("connection", "close"),),
    )


def decode_json(body: bytes) -> Any:
    """The body as plain Python values.

    Strict: UTF-8 and surrogate pairs must be whole, NaN is no number, and nesting is bounded by the
    decoder's recursion limit.

    Raises:
        APIError: 400, with what is wrong and where.
    """
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", code="invalid_json") from None
    except (msgspec.MsgspecError, ValueError) as error:
        too_large = _too_large_number(body) if "out of range" in str(error) else ""
        reason = too_large or _lone_surrogate(body) or str(error)
        raise bad_request(f"The request body is not valid JSON: {reason}", code="invalid_json") from None


def _lone_surrogate(body: bytes) -> str:
    """What is wrong, if it is that: the decoder speaks of truncated data."""
    before = _ESCAPES.match(body)
    half = _HALF.match(body, before.end() if before else 0)
    return f"{half[0].decode()} (byte {half.start()}) is half of a surrogate pair" if half else ""


def _too_large_number(body: bytes) -> str:
    """Which number it is that the decoder cannot take."""
    for found in _NUMBER.finditer(body):
        with contextlib.suppress(ValueError):
            if found[1] and math.isinf(float(found[1])):
                return f"{found[1][:40].decode()} (byte {found.start()}) is beyond the range of a double"
    return ""


async def send_json(send: Send, status: int, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> None:
    """A whole answer."""
    extra = [(name.encode(), value.encode()) for name, value in headers]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *extra]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: APIError, path: str) -> None:
    """An error as a whole answer to a request for `path`."""
    await send_json(send, error.status, error.body_for(path), error.headers)
