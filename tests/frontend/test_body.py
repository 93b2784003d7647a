"""Bodies: bounded, strict."""

from __future__ import annotations

import time
from typing import Any

import pytest

from servelite.frontend.body import ClientGone, decode_json, read_body
from servelite.frontend.errors import APIError

LIMIT = 1 << 20


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
    assert await read_body({"headers": []}, receiver(part(b"ab", True), part(b"c", False)), LIMIT) == b"abc"


async def test_a_client_that_leaves_is_noticed() -> None:
    with pytest.raises(ClientGone):
        await read_body({"headers": []}, receiver(part(b"ab", True), {"type": "http.disconnect"}), LIMIT)


async def test_a_large_body_is_refused_before_it_is_read() -> None:
    headers = [(b"content-length", str(LIMIT + 1).encode())]
    with pytest.raises(APIError) as caught:
        await read_body({"headers": headers}, receiver(), LIMIT)
    assert caught.value.status == 413


async def test_a_large_body_without_a_length_is_refused() -> None:
    half = b"x" * (LIMIT // 2)
    parts = receiver(part(half, True), part(half, True), part(b"x", True), part(half, True))
    with pytest.raises(APIError) as caught:
        await read_body({"headers": []}, parts, LIMIT)
    assert caught.value.status == 413
    exact = receiver(part(half, True), part(half, False))
    assert len(await read_body({"headers": []}, exact, LIMIT)) == LIMIT


@pytest.mark.parametrize(
    "header",
    [
        (b"content-type", b"application/json"),
        (b"content-type", b"Application/JSON ; charset=UTF-8"),
        (b"content-type", b'application/json;profile=x; charset="utf-8"'),
        (b"content-type", b""),
        (b"content-encoding", b"identity"),
    ],
)
async def test_media_types_that_are_served(header: tuple[bytes, bytes]) -> None:
    assert await read_body({"headers": [header]}, receiver(part(b"{}", False)), LIMIT) == b"{}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Content-Type", "text/plain"),
        ("Content-Type", "application/x-www-form-urlencoded"),
        ("Content-Type", "application/jsonp"),
        ("Content-Type", "application/json; charset=utf-16"),
        ("Content-Type", "application/json; a=b; charset=latin-1"),
        ("Content-Encoding", "gzip"),
    ],
)
async def test_media_types_that_are_not(name: str, value: str) -> None:
    with pytest.raises(APIError) as caught:
        await read_body({"headers": [(name.lower().encode(), value.encode())]}, receiver(), LIMIT)
    assert (caught.value.status, caught.value.code) == (415, "unsupported_media_type")
    assert name in caught.value.message and value in caught.value.message


async def test_headers_and_escapes_of_any_length_are_quickly_judged() -> None:
    started = time.monotonic()
    value = b"application/json" + b"; " * 50_000 + b"charset=latin-1"
    with pytest.raises(APIError):
        await read_body({"headers": [(b"content-type", value)]}, receiver(), LIMIT)
    for escape in (rb"\\", rb"\ud83d\ude00", rb"\ud83", b"a"):
        with pytest.raises(APIError):
            decode_json(b'{"a":"' + escape * 200_000)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("body", "at"),
    [
        (rb'{"a":"\ud800"}', 6),
        (rb'{"a":"\\ud800 \ud83d\ude00 \udc00"}', 27),
        (rb'{"a":"\uD800x"}', 6),
        (rb'{"a":"\udc00\ud800"}', 6),
    ],
)
def test_half_a_surrogate_pair_is_called_that(body: bytes, at: int) -> None:
    with pytest.raises(APIError, match=rf"\(byte {at}\) is half of a surrogate pair"):
        decode_json(body)


@pytest.mark.parametrize(
    ("number", "shown"), [("1e400", "1e400"), ("-1.5E+999", "-1.5E+999"), ("9" * 5000, "9" * 40)]
)
def test_a_number_that_no_double_holds_is_shown(number: str, shown: str) -> None:
    body = rf'{{"a": "\"1e500", "b": [1, -2.5e-3, {number}]}}'.encode()
    with pytest.raises(APIError) as caught:
        decode_json(body)
    told = f"The request body is not valid JSON: {shown} (byte 35) is beyond the range of a double"
    assert caught.value.message == told and caught.value.status == 400


def test_other_faults_are_not_called_that() -> None:
    for body in (rb'{"a":"\\ud800', rb'{"a":"\ud83d\ude00"', b"\\", b""):
        with pytest.raises(APIError) as caught:
            decode_json(body)
        assert "surrogate" not in caught.value.message
