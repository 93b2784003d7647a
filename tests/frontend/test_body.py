"""Bodies: bounded, strict."""

from __future__ import annotations

from typing import Any

import pytest

from servelite.frontend.body import MAX_BODY_BYTES, ClientGone, decode_json, read_body
from servelite.frontend.errors import APIError


def receiver(*messages: dict[str, Any]) -> Any:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    return receive


def part(data: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a":1',
        b'{"a":"\\ud800"}',
        b'{"a":"\\udc00\\ud800"}',
        b'{"a":"\xed\xa0\x80"}',
        b"\xff\xfe",
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{} {}",
    ],
)
def test_what_is_no_json_is_a_400(body: bytes) -> None:
    with pytest.raises(APIError) as caught:
        decode_json(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_json_is_read() -> None:
    assert decode_json('{"a":"\\ud83d\\ude00 é"}'.encode()) == {"a": "😀 é"}


async def test_parts_are_joined() -> None:
    assert await read_body({"headers": []}, receiver(part(b"ab", True), part(b"c", False))) == b"abc"


async def test_a_client_that_leaves_is_noticed() -> None:
    with pytest.raises(ClientGone):
        await read_body({"headers": []}, receiver(part(b"ab", True), {"type": "http.disconnect"}))


async def test_a_large_body_is_refused_before_it_is_read() -> None:
    headers = [(b"content-length", str(MAX_BODY_BYTES + 1).encode())]
    with pytest.raises(APIError) as caught:
        await read_body({"headers": headers}, receiver())
    assert caught.value.status == 413


async def test_a_large_body_without_a_length_is_refused() -> None:
    half = b"x" * (MAX_BODY_BYTES // 2)
    parts = receiver(part(half, True), part(half, True), part(b"x", True), part(half, True))
    with pytest.raises(APIError) as caught:
        await read_body({"headers": []}, parts)
    assert caught.value.status == 413
    exact = receiver(part(half, True), part(half, False))
    assert len(await read_body({"headers": []}, exact)) == MAX_BODY_BYTES
