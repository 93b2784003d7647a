"""Request bodies and whole answers over raw ASGI: bounded reads, strict JSON, error bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec

from servelite.frontend.errors import APIError, bad_request

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES: Final = 8 << 20
JSON: Final = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The client closed the connection: nobody waits for the answer."""


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """The whole request body.

    Raises:
        APIError: 413, it is over MAX_BODY_BYTES (told from Content-Length before reading, if it is there).
        ClientGone: the connection ended first.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > MAX_BODY_BYTES:
            raise _too_large()
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large() -> APIError:
    # The unread rest of the body would be taken for the next request: the connection ends here.
    return APIError(
        413,
        f"The request body is larger than {MAX_BODY_BYTES} bytes.",
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
        raise bad_request(f"The request body is not valid JSON: {error}", code="invalid_json") from None


async def send_json(send: Send, status: int, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> None:
    """A whole answer."""
    extra = [(name.encode(), value.encode()) for name, value in headers]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *extra]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: APIError) -> None:
    """An error as a whole answer."""
    await send_json(send, error.status, error.body(), error.headers)
