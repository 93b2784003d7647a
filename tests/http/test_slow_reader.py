"""A client that does not read costs only itself, and misses nothing."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from tests.http.server import running_server

TOKENS = 3000


def test_a_slow_reader(tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, "--executor", "simulated", "--simulated-step-ms", "0") as server:
        body = {
            "model": "demo",
            "prompt": "x",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "seed": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        payload = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(head + payload)
            deadline = time.monotonic() + 60
            while server.metrics()["servelite_generation_tokens_total"] < TOKENS:
                started = time.monotonic()
                other = {"model": "demo", "prompt": "x", "max_tokens": 1}
                assert server.post("/v1/completions", other)[0] == 200
                assert time.monotonic() - started < 5 and time.monotonic() < deadline
                time.sleep(0.1)
            server.idle_metrics()  # the engine is done with it, read or not
            sock.settimeout(30)
            data = b""
            while b"[DONE]" not in data:
                data += sock.recv(1 << 20)
        events = [json.loads(line[6:]) for line in _lines(data) if line.startswith(b"data: {")]
        assert events[-1]["usage"]["completion_tokens"] == TOKENS
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        del body["stream"], body["stream_options"]
        assert text == server.post("/v1/completions", body)[1]["choices"][0]["text"]
        assert len(events) < TOKENS  # what came while the socket was full was merged


def _lines(data: bytes) -> list[bytes]:
    """The lines of a chunked body: a chunk's size stands on a line of its own."""
    return data.partition(b"\r\n\r\n")[2].replace(b"\r\n", b"\n").split(b"\n")
