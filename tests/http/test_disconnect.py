"""A client that is gone has its blocks back within depth + 1 steps, streaming or not."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.server import Server, running_server

STEP_MS = 200
DEPTH = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    flags = ("--executor", "simulated", "--simulated-step-ms", str(STEP_MS), "--async-depth", str(DEPTH))
    with running_server(tmp_path_factory.mktemp("gone"), *flags) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
def test_blocks_come_back(server: Server, stream: bool) -> None:
    total = server.metrics()["servelite_kv_blocks_total"]
    body = {
        "model": "demo",
        "prompt": [1] * 100,
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": stream,
    }
    payload = json.dumps(body).encode()
    request = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(request + payload)
        deadline = time.monotonic() + 10
        while (now := server.metrics())["servelite_engine_steps_total"] < 3 or now[
            "servelite_num_requests_running"
        ] != 1:
            assert time.monotonic() < deadline, now
            time.sleep(0.02)
        assert now["servelite_kv_blocks_free"] < total
        if stream:
            assert b"data: " in sock.recv(65536)
    gone = time.monotonic()
    steps = server.metrics()["servelite_engine_steps_total"]
    while (now := server.metrics())["servelite_kv_blocks_free"] < total:
        assert time.monotonic() < gone + 10, now
        time.sleep(0.01)
    assert now["servelite_engine_steps_total"] - steps <= DEPTH + 1
    assert time.monotonic() - gone < 5 * (DEPTH + 1) * STEP_MS / 1000
    assert now["servelite_num_requests_running"] == 0
    assert now["servelite_requests_aborted_total"] >= 1


def test_a_client_that_leaves_at_once(server: Server) -> None:
    """Gone before its first token: hardly any of its 500 steps is made, if it comes to the engine at all."""
    steps = server.idle_metrics()["servelite_engine_steps_total"]
    payload = b'{"model":"demo","prompt":"x","max_tokens":500}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(payload) + payload
        )
    time.sleep(10 * STEP_MS / 1000)
    assert server.idle_metrics()["servelite_engine_steps_total"] - steps < 50
