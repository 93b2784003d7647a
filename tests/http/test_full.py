"""A server that is full refuses at once, says when to come back, and takes requests again."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path

from tests.http.server import running_server


def test_the_queue_is_bounded(tmp_path: Path, demo_model: Path) -> None:
    flags = ("--executor", "simulated", "--simulated-step-ms", "100")
    with running_server(tmp_path, *flags, "--max-num-seqs", "1", "--max-waiting-requests", "1") as server:
        body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1000, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with ExitStack() as stack:
            for _ in range(2):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
                sock.sendall(head + body)
            deadline = time.monotonic() + 10
            while (now := server.metrics())["servelite_num_requests_waiting"] != 1:
                assert time.monotonic() < deadline, now
                time.sleep(0.02)
            assert now["servelite_num_requests_running"] == 1
            connection = server.connect()
            started = time.monotonic()
            connection.request("POST", "/v1/completions", body)
            answer = connection.getresponse()
            assert time.monotonic() - started < 5
            assert answer.status == 503 and 1 <= int(answer.headers["retry-after"]) <= 90
            assert json.load(answer)["error"]["code"] == "queue_full"
            connection.close()
            assert server.metrics()['servelite_requests_refused_total{reason="queue_full"}'] == 1
            assert server.get("/health/ready")[0] == 200  # full is not ill
        server.idle_metrics()
        assert server.post("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1})[0] == 200
