"""Bad input: bodies that are no request, and bodies that are too much of one."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest

from tests.conformance.target import CHAT, COMPLETIONS, GREEDY, Target, error_of

JSON = "application/json"
MESSAGE = b'{"model":"%s","messages":[{"role":"user","content":"%s"}],"max_tokens":1}'


@pytest.mark.parametrize(
    ("body", "kind", "statuses"),
    [
        (b'{"model":"$","messages":[{"role":"user","content":"x"}], x}', JSON, {400}),
        (b"", JSON, {400}),
        (b"[]", JSON, {400}),
        (b"null", JSON, {400}),
        (b"form", "application/x-www-form-urlencoded", {200, 400, 415}),
        (b"form", "text/plain", {200, 400, 415}),
        (b"form", "application/json; charset=utf-8", {200}),
        (MESSAGE % (b"$", b"\xff\xfe"), JSON, {400}),
        (MESSAGE % (b"$", rb"cut \ud83d"), JSON, {200, 400}),
        (MESSAGE % (b"$", rb"a\u0000b"), JSON, {200}),
    ],
    ids=["broken", "empty", "array", "nul", "form", "plain", "charset", "latin", "sur", "nulchar"],
)
def test_bad_01_malformed_bodies(target: Target, body: bytes, kind: str, statuses: set[int]) -> None:
    """BAD-01. Never a 500, which an SDK would try again."""
    body = MESSAGE % (b"$", b"x") if body == b"form" else body
    reply = target.post(CHAT, body.replace(b"$", target.model.encode()), {"content-type": kind})
    assert reply.status_code in statuses, reply.text
    if reply.status_code != 200:
        error_of(reply)
    reply.content.decode("utf-8")
    target.check_alive()


def test_bad_01_lone_surrogates_in_prompt_and_stop(target: Target) -> None:
    """BAD-01, sur2."""
    body = rb'{"model":"$","max_tokens":1,"prompt":"\ude00 x","stop":["\ud800"]}'
    reply = target.post(COMPLETIONS, body.replace(b"$", target.model.encode()))
    assert reply.status_code in (200, 400)
    reply.content.decode("utf-8")
    target.check_alive()


def _chat(model: str, more: bytes) -> bytes:
    """A valid chat request with more text before its closing brace."""
    return MESSAGE.replace(b'"max_tokens":1}', b'"max_tokens":1,') % (model.encode(), b"x") + more + b"}"


def _huge(name: str, model: str) -> tuple[str, bytes]:
    """Path and body of each of the case's requests."""
    tool = b'"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]'
    if name == "ignored":
        return CHAT, _chat(model, b'"x":' + b"[" * 100_000 + b"]" * 100_000)
    if name == "tools":
        return CHAT, _chat(model, b'"tools":' + b"[" * 3000 + b"]" * 3000)
    if name == "params":
        return CHAT, _chat(model, tool % (b'{"not":' * 2000 + b"{}" + b"}" * 2000))
    if name == "meta":
        return CHAT, _chat(model, b'"metadata":' + json.dumps({f"k{i}": "v" for i in range(1000)}).encode())
    if name == "big":
        return CHAT, MESSAGE % (model.encode(), b"a " * (32 << 20))
    if name == "many":
        messages = [{"role": "user", "content": "x"}] * 100_000
        return CHAT, json.dumps({"model": model, "max_tokens": 1, "messages": messages}).encode()
    stops = {"model": model, "max_tokens": 1, "prompt": "x", "stop": [f"s{i}" for i in range(100_000)]}
    return COMPLETIONS, json.dumps(stops).encode()


@pytest.mark.parametrize("name", ["ignored", "tools", "params", "meta", "big", "many", "stops"])
def test_bad_02_huge_and_deep_bodies(target: Target, name: str) -> None:
    """BAD-02. An answer in time, a small request meanwhile, the memory given back."""
    path, body = _huge(name, target.model)
    before, slowest, over = target.resident(), [0.0], threading.Event()

    def small() -> None:
        with httpx.Client(base_url=target.url, headers=target.client.headers, timeout=30) as client:
            while not over.is_set():
                begun = time.monotonic()
                asked = {"model": target.model, "prompt": "a", "max_tokens": 1} | GREEDY
                assert client.post(COMPLETIONS, json=asked).status_code == 200
                slowest[0] = max(slowest[0], time.monotonic() - begun)

    thread = threading.Thread(target=small)
    thread.start()
    begun = time.monotonic()
    try:
        reply = target.post(path, body)
        status = reply.status_code
        if status != 200:
            error_of(reply)
    except (httpx.WriteError, httpx.ReadError):
        assert name == "big"  # told before it was sent to its end, the connection closed
        status = 413
    finally:
        over.set()
        thread.join()
    assert status in (200, 400, 413) and time.monotonic() - begun < 30
    assert slowest[0] < 5
    assert target.resident() - before < 10 * len(body) + (64 << 20)
    target.check_alive()
