"""A client that leaves a stream frees what it held."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable

import pytest

from tests.conformance.setups import BUSY, Servers
from tests.conformance.target import COMPLETIONS, GREEDY, Target, together

LONG = {"prompt": "a", "max_tokens": 250, "ignore_eos": True} | GREEDY
SECONDS = 5.0


@pytest.fixture(scope="module")
def busy(servers: Servers) -> Target:
    return servers.own(BUSY)


class Leaver:
    """A stream whose client goes without a word: its socket is reset."""

    def __init__(self, target: Target, *, chunks: int, **fields: int) -> None:
        assert target.own is not None
        body = json.dumps(
            {"model": target.model, "stream": True} | LONG | {"max_tokens": 4000} | fields
        ).encode()
        self._socket = socket.create_connection(("127.0.0.1", target.own.port), timeout=30)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        data = b""
        while data.count(b"data: ") < chunks:
            data += self._socket.recv(65536)

    def leave(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _leave_and_stay(busy: Target, expected: str) -> None:
    """The case once: three leave, one stays, with a fifth in the queue that leaves too."""

    def leavers() -> None:
        gone = [Leaver(busy, chunks=5) for _ in range(3)]
        wait_for(lambda: busy.metric("num_requests_running") == 4)
        queued = Leaver(busy, chunks=0)
        wait_for(lambda: busy.metric("num_requests_waiting") == 1)
        one = busy.metric("kv_cache_usage_perc")
        for each in (*gone, queued):
            each.leave()
        wait_for(lambda: busy.metric("num_requests_running") == 1)
        assert busy.metric("num_requests_waiting") == 0 and busy.metric("kv_cache_usage_perc") < one
        begun = time.monotonic()
        busy.plain(COMPLETIONS, {"prompt": "b", "max_tokens": 1})
        assert time.monotonic() - begun < 1 and busy.metric("num_requests_running") == 1

    stays, _ = together([lambda: busy.stream(COMPLETIONS, LONG).text, leavers])
    assert stays == expected


def test_dsc_01_who_leaves_frees_all_and_disturbs_nobody(busy: Target) -> None:
    """DSC-01, s and queued."""
    expected = busy.plain(COMPLETIONS, LONG).text
    _leave_and_stay(busy, expected)
    assert busy.own is not None
    busy.own.idle_metrics()
    tokens = busy.metric("generation_tokens_total")
    time.sleep(0.1)
    assert busy.metric("generation_tokens_total") == tokens
    busy.check_alive()


def test_dsc_01_all_choices_of_a_request_go(busy: Target) -> None:
    """DSC-01, n3."""
    leaver = Leaver(busy, chunks=6, n=3)
    wait_for(lambda: busy.metric("num_requests_running") == 3)
    leaver.leave()
    assert busy.own is not None
    busy.own.idle_metrics(SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dsc_01_fifty_times_leave_nothing(busy: Target) -> None:
    """DSC-01, last line."""
    expected = busy.plain(COMPLETIONS, LONG).text
    for _ in range(50):
        _leave_and_stay(busy, expected)
    assert busy.own is not None
    busy.own.idle_metrics()
    assert busy.own.errors() == ""
    busy.check_alive()
