"""The whole server over real sockets, on the simulated executor."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest

from tests.http.server import Server, running_server

SCRIPT = [
    {"prompt": "What is the capital of France?", "text": "The capital of France is Paris."},
    {"prompt": "Count.", "text": "one two three four five six"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("http")
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps(line) + "\n" for line in SCRIPT))
    flags = ("--executor", "simulated", "--simulated-step-ms", "2", "--simulated-script", str(script))
    with running_server(folder, *flags) as running:
        yield running


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **fields}


def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    connection = server.connect()
    try:
        connection.request("POST", path, json.dumps(body | {"stream": True}))
        answer = connection.getresponse()
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]
    finally:
        connection.close()


def test_a_scripted_answer(server: Server) -> None:
    status, body = server.post("/v1/chat/completions", chat("What is the capital of France?"))
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_stream_adds_up_to_the_plain_answer(server: Server) -> None:
    for fields in ({"seed": 7, "max_tokens": 30}, {"seed": 8, "max_tokens": 30, "temperature": 0}):
        body = chat("anything", **fields)
        plain = server.post("/v1/chat/completions", body)[1]
        streamed = events(server, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in streamed if e["choices"])
        assert text == plain["choices"][0]["message"]["content"]
        assert streamed[-1]["usage"] == plain["usage"]
        assert streamed[-2]["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]


def test_a_stop_string(server: Server) -> None:
    body = chat("Count.", stop=[" four", "never"])
    answer = server.post("/v1/chat/completions", body)[1]
    assert answer["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": " four",
        "message": {"role": "assistant", "content": "one two three", "refusal": None},
    }
    streamed = events(server, "/v1/chat/completions", body)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in streamed) == "one two three"
    server.idle_metrics()  # the engine was told to stop


def test_many_at_once(server: Server) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 20, "temperature": 0}
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
        for _ in range(24)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for status, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1


def test_connections_are_kept(server: Server) -> None:
    connection = server.connect()
    try:
        for _ in range(3):
            connection.request("POST", "/v1/completions", '{"model":"demo","prompt":"x","max_tokens":1}')
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()
            assert connection.sock is not None  # http.client drops it when the server closes
        connection.request("POST", "/v1/completions", "{")
        assert connection.getresponse().read() and connection.sock is not None
    finally:
        connection.close()


def test_nonsense_on_the_wire_is_harmless(server: Server) -> None:
    for data in (
        b"\0\xff\0\xff\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\n\r\n{",
        b"",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
            sock.sendall(data)
    assert server.get("/health/ready")[0] == 200


def test_a_chunked_body_over_the_limit_is_refused(server: Server) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(9):
            yield b"x" * (1 << 20)

    connection = server.connect()
    try:
        connection.request("POST", "/v1/completions", parts(), encode_chunked=True)
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server answered and closed while this end was still sending
    finally:
        connection.close()
    assert server.get("/health/ready")[0] == 200


def test_metrics_add_up(server: Server) -> None:
    before = server.metrics()
    usage = server.post("/v1/completions", {"model": "demo", "prompt": "a b c", "max_tokens": 7})[1]["usage"]
    server.post("/v1/completions", {"model": "demo", "prompt": "x", "best_of": 3})
    after = server.idle_metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("servelite_prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("servelite_generation_tokens_total") == usage["completion_tokens"] == 7
    assert grown('servelite_request_success_total{finished_reason="length"}') == 1
    assert grown('servelite_requests_refused_total{reason="unsupported_value"}') == 1
    assert grown("servelite_time_to_first_token_seconds_count") == 1
    assert grown("servelite_inter_token_latency_seconds_count") == 6
    assert grown('servelite_inter_token_latency_seconds_bucket{le="+Inf"}') == 6
    assert grown("servelite_e2e_request_latency_seconds_count") == 1
    assert grown("servelite_engine_steps_total") >= 7
    assert after["servelite_kv_cache_usage_perc"] == 0


def test_probes(server: Server) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/version", "/v1/models", "/metrics"):
        assert server.get(path)[0] == 200, path


def test_answers_are_dated(server: Server) -> None:
    """uvicorn's clock does not tick here: the date is made when it is asked for."""
    dates = []
    for _ in range(2):
        connection = server.connect()
        connection.request("GET", "/version")
        answer = connection.getresponse()
        answer.read()
        connection.close()
        dates.append(parsedate_to_datetime(answer.headers["date"]))
        assert abs(dates[-1].timestamp() - time.time()) < 5
        time.sleep(1.1)
    assert dates[0] < dates[1]


def test_the_front_end_loads_no_torch(server: Server) -> None:
    """A second API worker must be cheap."""
    pid = server.child("front end 0")
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps and "tokenizers" in maps


def test_an_idle_server_uses_no_cpu(server: Server) -> None:
    def ticks() -> int:
        total = 0
        for pid in (server.process.pid, *server.children()):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total

    time.sleep(0.3)
    before = ticks()
    time.sleep(2.0)
    assert ticks() - before <= 2  # 20 ms in 2 s, for all processes together
