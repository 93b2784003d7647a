"""How a server ends: signals, deaths, and that nothing is left (the leftovers plugin looks, too)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path

import pytest

from servelite.ipc.process import ExitCode
from tests.faults.streams import all_streams
from tests.http.server import Server, end, running_server, start_server, wait_ready

FLAGS = ("--executor", "simulated", "--simulated-step-ms", "50")


@pytest.fixture
def server(tmp_path: Path, demo_model: Path) -> Iterator[Server]:
    with running_server(
        tmp_path, *FLAGS, "--drain-timeout", "20", "--runtime-dir", str(tmp_path / "r")
    ) as made:
        yield made


@contextmanager
def open_stream(server: Server, tokens: int) -> Iterator[HTTPResponse]:
    """A stream that has begun."""
    body = {"model": "demo", "prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    connection = server.connect()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")
        yield answer
    finally:
        connection.close()


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}/cmdline").exists() and _cmdline(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for a zombie that nobody has reaped
    except OSError:
        return b""


def nothing_left(server: Server, folder: Path) -> bool:
    with socket.socket() as sock:
        refused = sock.connect_ex(("127.0.0.1", server.port)) != 0
    return refused and not (folder / "r").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_an_idle_server(server: Server, tmp_path: Path, number: int) -> None:
    children = server.children()
    assert len(children) == 2 and any((tmp_path / "r").iterdir())
    started = time.monotonic()
    server.signal(number)
    assert server.wait() == ExitCode.OK
    assert time.monotonic() - started < 10
    assert gone(children, 0.5) and nothing_left(server, tmp_path)
    first, last = server.errors().splitlines()
    assert first.startswith("servelite: draining: 0 answers in flight, up to 20 s; a second signal")
    assert last == "servelite: drained: no answers were cut"


def test_ctrl_c_in_a_terminal_reaches_the_whole_group(tmp_path: Path, demo_model: Path) -> None:
    """The children leave the decision to the launcher: an open stream still ends well."""
    with running_server(tmp_path, *FLAGS) as server, open_stream(server, 10) as stream:
        for pid in (*server.children(), server.process.pid):
            os.kill(pid, signal.SIGINT)
        assert b"[DONE]" in stream.read()
        assert server.wait() == ExitCode.OK


def test_answers_in_flight_finish(server: Server) -> None:
    with open_stream(server, 20) as stream:
        server.signal(signal.SIGTERM)
        time.sleep(0.2)
        status, refused = server.post("/v1/completions", {"model": "demo", "prompt": "x"})
        assert (status, refused["error"]["code"]) == (503, "server_shutting_down")
        assert server.get("/health/ready")[0] == 503 and server.get("/health/live")[0] == 200
        events = stream.read()
        assert b'"finish_reason":"length"' in events and events.endswith(b"data: [DONE]\n\n")
    assert server.wait() == ExitCode.OK


@pytest.mark.slow
async def test_eight_streams_finish_and_the_door_closes_after_the_delay(
    tmp_path: Path, demo_model: Path
) -> None:
    delay, timeout, tokens = 2.0, 20.0, 100  # of 50 ms: they outlast the delay
    flags = (*FLAGS, "--drain-delay", str(delay), "--drain-timeout", str(timeout))
    new = {"model": "demo", "prompt": "x", "max_tokens": 1}
    body = {"model": "demo", "ignore_eos": True, "max_tokens": tokens, "temperature": 1}
    with running_server(tmp_path, *flags) as server:
        streams = await all_streams(server.port, [body | {"prompt": [at + 1], "seed": at} for at in range(8)])
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        while (await asyncio.to_thread(server.get, "/health/ready"))[0] == 200:
            assert time.monotonic() - began < delay
        answers = [await asyncio.to_thread(server.post, "/v1/completions", new)]
        assert answers[0][0] == 200, answers  # a balancer has not noticed yet
        while answers[-1][0] == 200:
            answers.append(await asyncio.to_thread(server.post, "/v1/completions", new))
        assert time.monotonic() - began > delay * 0.9
        assert answers[-1][0] == 503 and answers[-1][1]["error"]["code"] == "server_shutting_down"
        assert not any(stream.done() for stream in streams)
        for told in await asyncio.gather(*streams):
            assert (len(told.token_ids), told.finish_reason, told.error) == (tokens, "length", None)
            assert told.done and told.usage is not None and told.usage["completion_tokens"] == tokens
        assert await asyncio.to_thread(server.wait) == ExitCode.OK
        assert time.monotonic() - began < delay + timeout
        assert server.errors().splitlines()[-1] == "servelite: drained: no answers were cut"


def test_what_is_left_at_the_time_out_gets_an_error(tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, *FLAGS, "--drain-timeout", "0.5") as server:
        with open_stream(server, 1000) as stream:
            server.signal(signal.SIGTERM)
            events = stream.read()
        assert b'"code":"server_shutting_down"' in events and b"[DONE]" not in events
        assert server.wait() == ExitCode.OK


def test_a_second_signal_ends_it_at_once(server: Server, tmp_path: Path) -> None:
    children = server.children()
    with open_stream(server, 1000) as stream:
        server.signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        started = time.monotonic()
        server.signal(signal.SIGINT)
        assert b'"code":"server_shutting_down"' in stream.read()
        assert server.wait() == ExitCode.OK
        assert time.monotonic() - started < 6  # about 1 where nothing else runs
    first, last = server.errors().splitlines()
    assert "draining: 1 answers in flight" in first and last == "servelite: drained: 1 answers were cut"
    assert gone(children, 0.5) and nothing_left(server, tmp_path)


def test_a_second_signal_does_not_wait_for_a_client_that_does_not_read(
    tmp_path: Path, demo_model: Path
) -> None:
    fast = ("--executor", "simulated", "--simulated-step-ms", "0", "--max-model-len", "32768")
    prompt = " understanding" * 20_000  # echoed 32 times: more megabytes than the kernel holds
    body = {"model": "demo", "prompt": prompt, "echo": True, "n": 32, "max_tokens": 10, "ignore_eos": True}
    data = json.dumps(body | {"stream": True}).encode()
    with running_server(tmp_path, *fast) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data))
        sock.sendall(data)
        assert sock.recv(1)  # and no more
        while server.metrics()["servelite_generation_tokens_total"] < 320:
            time.sleep(0.1)
        children = server.children()
        server.signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == ExitCode.OK
        assert time.monotonic() - started < 6 and gone(children, 0.5)
        assert server.errors().splitlines()[-1].startswith("servelite: drained: time is over")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_work_whatever_the_server_inherits(tmp_path: Path, demo_model: Path, number: int) -> None:
    """Both as a shell's `&` or a careless supervisor leaves them: ignored, and blocked as well."""
    watched = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    before = {each: signal.signal(each, signal.SIG_IGN) for each in watched}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        server = start_server(tmp_path, *FLAGS)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each, handler in before.items():
            signal.signal(each, handler)
    try:
        wait_ready(server)
        children = server.children()
        server.signal(number)
        assert server.wait(5) == ExitCode.OK
        assert gone(children, 0.5)
    finally:
        server.process.kill()  # were the signal ignored, `end` would wait long
        end(server)


def test_bodies_that_never_come_do_not_hold_up_the_end(server: Server) -> None:
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    paths = (b"/v1/completions", b"/v1/chat/completions", b"/tokenize")
    sockets = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in paths]
    try:
        for sock, path in zip(sockets, paths, strict=True):
            sock.sendall(head % path)
        assert server.get("/health/ready")[0] == 200
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        for sock in sockets:
            assert sock.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert server.wait() == ExitCode.OK
        assert time.monotonic() - started < 12
    finally:
        for sock in sockets:
            sock.close()
    assert "Traceback" not in server.errors() and "last words" not in server.errors()


def test_a_signal_while_it_starts(tmp_path: Path, demo_model: Path) -> None:
    server = start_server(tmp_path, *FLAGS, "--runtime-dir", str(tmp_path / "r"))
    try:
        deadline = time.monotonic() + 20
        while len(server.children()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        children = server.children()
        server.signal(signal.SIGINT)
        assert server.wait(10) == ExitCode.OK
        assert gone(children, 0.5) and not (tmp_path / "r").exists()
    finally:
        end(server)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_children_do_not_outlive_the_launcher(tmp_path: Path, demo_model: Path, ranks: int) -> None:
    flags = (*FLAGS, "--runtime-dir", str(tmp_path / "r"))
    more = ("--api-workers", "2", "--tp", str(ranks))
    with running_server(tmp_path, *flags, *more) as server, open_stream(server, 1000):
        children = server.children()
        assert len(children) == (3 if ranks == 1 else 3 + ranks)
        server.signal(signal.SIGKILL)
        server.wait()
        assert gone(children, 2)
    assert len(list((tmp_path / "r").iterdir())) == 1  # nobody was left to remove it, but the next one does
    with running_server(tmp_path, *flags):
        assert len(list((tmp_path / "r").iterdir())) == 1
    (tmp_path / "r").rmdir()


def test_a_port_in_use(server: Server, tmp_path: Path) -> None:
    second = start_server(tmp_path, "--executor", "simulated", "--port", str(server.port))
    try:
        assert second.wait(20) == ExitCode.SETTING
        (line,) = second.errors().splitlines()
        assert str(server.port) in line and "in use" in line
    finally:
        end(second)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    server = start_server(tmp_path, model=str(tmp_path / "none.gguf"))
    try:
        assert server.wait(20) == ExitCode.MODEL
        (line,) = server.errors().splitlines()
        assert "none.gguf" in line
    finally:
        end(server)


def test_a_damaged_model(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\x03\0\0\0 and then nonsense" * 10)
    server = start_server(tmp_path, "--executor", "simulated", model=str(tmp_path / "bad.gguf"))
    try:
        assert server.wait(30) == ExitCode.MODEL
        (line,) = server.errors().splitlines()
        assert "bad.gguf" in line and "front end" not in line
    finally:
        end(server)


def test_a_setting_that_cannot_be(tmp_path: Path) -> None:
    server = start_server(tmp_path, "--max-num-seqs", "0")
    try:
        assert server.wait(20) == ExitCode.SETTING
        (line,) = server.errors().splitlines()
        assert "--max-num-seqs" in line
    finally:
        end(server)


def test_two_servers_share_a_runtime_folder(server: Server, tmp_path: Path) -> None:
    second = start_server(tmp_path, *FLAGS, "--runtime-dir", str(tmp_path / "r"))
    try:
        wait_ready(second)
        assert len(list((tmp_path / "r").iterdir())) == 2
        end(second)
        assert second.wait() == ExitCode.OK
        assert len(list((tmp_path / "r").iterdir())) == 1
        body = {"model": "demo", "prompt": "x", "max_tokens": 1}
        assert server.post("/v1/completions", body)[0] == 200
    finally:
        end(second)
