"""Settings as a running server shows them, and starts that cannot succeed."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

from servelite.ipc.process import ExitCode
from tests.http.server import Server, end, running_server, start_server
from tests.http.test_ends import open_stream
from tests.tokenizer.small_folder import save, sentencepiece

SIMULATED = ("--executor", "simulated", "--simulated-step-ms", "2")


def failing(folder: Path, *flags: str, model: str = "demo") -> tuple[int, str]:
    """Exit code and last line of a start that cannot succeed."""
    server = start_server(folder, *SIMULATED, *flags, model=model)
    try:
        code = server.wait(30)
        assert "Traceback" not in server.errors()
        return code, server.errors().splitlines()[-1]
    finally:
        end(server)


def ask(server: Server, path: str, key: str | None, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.load(answer)
    finally:
        connection.close()


def read_error(sock: socket.socket) -> bytes:
    """An answer that is an error: it ends with its body's braces."""
    data = b""
    while not data.endswith(b"}}"):
        part = sock.recv(4096)
        assert part, data
        data += part
    return data


def test_keys_and_connections(tmp_path: Path, demo_model: Path) -> None:
    flags = ("--api-key", "one", "two", "--timeout-keep-alive", "1", "--max-body-bytes", "2000")
    with running_server(tmp_path, *SIMULATED, *flags) as server:
        body = {"model": "demo", "prompt": "x", "max_tokens": 2}
        assert ask(server, "/health/ready", None)[0] == 200
        for key, status in ((None, 401), ("three", 401), ("one", 200), ("two", 200)):
            assert ask(server, "/v1/models", key)[0] == status
            assert ask(server, "/v1/completions", key, body)[0] == status
        assert ask(server, "/v1/completions", "one", body | {"prompt": "x" * 3000})[0] == 413
        # A refused body, however late it comes, does not spoil the connection; an idle one is closed.
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            for _ in range(2):
                sock.sendall(head)
                time.sleep(0.2)
                sock.sendall(data)
                assert read_error(sock).startswith(b"HTTP/1.1 401 ")
            started = time.monotonic()
            assert sock.recv(1) == b"" and 0.5 < time.monotonic() - started < 5
        # A body that never comes is not waited for.
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(head)
            answer = read_error(sock)
            assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answer
            assert sock.recv(1) == b""
        assert "two" not in server.errors()


def test_a_body_beyond_the_limit_is_told_so(tmp_path: Path, demo_model: Path) -> None:
    """A client that goes on sending still reads the answer: the connection is not reset under it."""
    with running_server(tmp_path, *SIMULATED, "--max-body-bytes", "2000") as server:
        for length in (b"content-length: 20000000", b"transfer-encoding: chunked"):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n\r\n"
            body = b"x" * 20_000_000
            if b"chunked" in length:
                body = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
                sock.sendall(head + body)
                answer = read_error(sock)
                assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer
                assert sock.recv(1) == b""
        assert server.post("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1})[0] == 200
        assert "Traceback" not in server.errors()


def test_a_chat_template_of_ones_own(tmp_path: Path, demo_model: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
        "<|im_start|>{{ messages[0].content }}{{ mood }}"
        "{% if loop_for_ever %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        "{% endif %}"
    )
    with running_server(tmp_path, *SIMULATED, "--chat-template", str(template)) as server:
        said = [{"role": "user", "content": "hi"}]
        asked = {"messages": said, "chat_template_kwargs": {"mood": "!"}, "return_token_strs": True}
        assert "".join(server.post("/tokenize", asked)[1]["token_strs"]) == "<|im_start|>hi!"
        chat = {"model": "demo", "messages": said, "max_tokens": 2}
        status, refused = server.post("/v1/chat/completions", chat | {"messages": said * 2})
        assert status == 400 and "one message only" in refused["error"]["message"]
        endless = chat | {"chat_template_kwargs": {"loop_for_ever": True}}
        status, refused = server.post("/v1/chat/completions", endless)
        assert status == 400 and "runs for more than" in refused["error"]["message"]
        assert server.post("/v1/chat/completions", chat)[0] == 200


def test_a_silent_stream_gets_comments(tmp_path: Path, demo_model: Path) -> None:
    flags = ("--executor", "simulated", "--simulated-step-ms", "400", "--sse-keep-alive", "0.1")
    with running_server(tmp_path, *flags) as server:
        connection = server.connect()
        body = {"model": "demo", "prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        text = connection.getresponse().read().decode()
        connection.close()
        events = [event for event in text.split("\n\n") if event]
        assert events.count(": waiting") >= 5  # between its tokens as well
        assert [event for event in events if not event.startswith(":")][-1] == "data: [DONE]"


def test_a_drain_may_begin_later(tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, *SIMULATED, "--drain-delay", "2.5") as server:
        with open_stream(server, 2000) as stream:  # it outlasts the delay
            server.signal(signal.SIGTERM)
            started = time.monotonic()
            while server.get("/health/ready")[0] == 200:
                assert time.monotonic() - started < 2
            body = {"model": "demo", "prompt": "x", "max_tokens": 1}
            assert server.post("/v1/completions", body)[0] == 200  # a balancer has not noticed yet
            while (answer := server.post("/v1/completions", body))[0] == 200:
                assert time.monotonic() - started < 20
                time.sleep(0.05)
            assert time.monotonic() - started > 2
            assert answer[1]["error"]["code"] == "server_shutting_down"
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert server.wait() == ExitCode.OK


def test_a_run_repeats_with_a_seed(tmp_path: Path, demo_model: Path) -> None:
    runs = []
    for _ in range(2):
        with running_server(tmp_path, *SIMULATED, "--seed", "5") as server:
            body = {"model": "demo", "prompt": "x", "max_tokens": 5, "ignore_eos": True}
            answers = [server.post("/v1/completions", body)[1]["choices"][0]["text"] for _ in range(3)]
            runs.append(answers)
    assert runs[0] == runs[1] and len(set(runs[0])) == 3


def test_a_template_that_is_no_jinja(tmp_path: Path, demo_model: Path) -> None:
    (tmp_path / "bad.jinja").write_text("fine\n{% for %}")
    code, line = failing(tmp_path, "--chat-template", str(tmp_path / "bad.jinja"))
    assert code == ExitCode.MODEL
    assert line.startswith("servelite: ") and "the chat template is not valid, line 2" in line


def test_a_file_that_is_not_there(tmp_path: Path, demo_model: Path) -> None:
    code, line = failing(tmp_path, "--chat-template", str(tmp_path / "none"))
    assert code == ExitCode.MODEL and "none" in line and line.startswith("servelite: ")


def test_a_models_own_sampling_defaults(tmp_path: Path) -> None:
    """A folder's generation_config.json: greedy unless the client says otherwise."""
    model = save(tmp_path / "m", sentencepiece(), bos_token="<s>", eos_token="</s>")
    (model / "generation_config.json").write_text('{"temperature": 0.0}')
    body = {"model": "m", "prompt": "hi", "max_tokens": 8, "ignore_eos": True}
    flags = (*SIMULATED, "--served-model-name", "m")
    for more, different in (((), 1), (("--generation-config", "none"), 4)):
        with running_server(tmp_path, *flags, *more, model=str(model)) as server:
            answers = {
                server.post("/v1/completions", body | {"seed": seed})[1]["choices"][0]["text"]
                for seed in range(4)
            }
            assert len(answers) == different
            assert ("temperature 0.0" in server.errors()) == (not more)
