"""The engine core as a process: boot, hello, requests over ZeroMQ, and every way it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from servelite.config import Settings
from servelite.ipc.lifeline import lifeline_pair
from servelite.ipc.messages import (
    CONTRACT_VERSION,
    FLAG,
    NUMBER,
    Abort,
    Add,
    Boot,
    ChildFailed,
    ChildReady,
    FinishReason,
    Hello,
    Outputs,
    Ready,
    SamplingParams,
    Stop,
    pack,
    unpack,
)
from servelite.ipc.process import ExitCode
from servelite.ipc.progress import ProgressPage
from servelite.ipc.sockets import decode_from_engine, encode, engine_address


class Engine:
    """A child engine and one front end's socket to it."""

    def __init__(self, runtime_dir: Path, settings: Settings) -> None:
        self.lifeline, fd = lifeline_pair()
        self.page = ProgressPage.create()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "servelite.engine", "--lifeline", str(fd)], pass_fds=[fd, self.page.fd]
        )
        os.close(fd)
        self.address = engine_address(str(runtime_dir), 0, 1)
        self.lifeline.send(Boot(settings.to_dict(), 0, 1, self.address, self.page.fd))
        self.context = zmq.Context()

    def connect(self, client: int = 0) -> zmq.Socket[bytes]:
        sock = self.context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, 20_000)
        sock.connect(self.address)
        sock.send(encode(Hello(client, CONTRACT_VERSION)))
        return sock

    def end(self) -> int:
        self.lifeline.send(Stop())
        code = self.process.wait(20)
        self.lifeline.close()
        self.context.destroy(0)
        return code


@pytest.fixture
def engine(tmp_path: Path, demo_model: Path) -> Iterator[Engine]:
    settings = Settings(model=str(demo_model), executor="simulated", simulated_step_ms=20, max_num_seqs=4)
    child = Engine(tmp_path, settings)
    yield child
    if child.process.poll() is None:
        assert child.end() == ExitCode.OK
    assert list(tmp_path.glob("*.sock")) == []


def outputs(sock: zmq.Socket[bytes]) -> Iterator[Outputs]:
    while True:
        message = decode_from_engine(sock.recv())
        if isinstance(message, Outputs):
            yield message


def add(number: int, max_tokens: int) -> bytes:
    return encode(Add(number, pack(range(1, 20)), SamplingParams(max_tokens=max_tokens), seed=1))


def test_a_request_from_hello_to_its_last_token(engine: Engine) -> None:
    assert isinstance(engine.lifeline.recv(), ChildReady)
    sock = engine.connect()
    ready = decode_from_engine(sock.recv())
    assert isinstance(ready, Ready) and ready.epoch == 1 and ready.vocab_size == 49152
    sock.send(add(5, 3))
    tokens: list[int] = []
    for message in outputs(sock):
        tokens += unpack(message.tokens).tolist()
        if unpack(message.finish, FLAG).any():
            break
    assert len(tokens) == 3
    assert unpack(message.finish, FLAG).tolist() == [FinishReason.LENGTH]


def test_junk_and_strangers_do_not_stop_it(engine: Engine) -> None:
    sock = engine.connect()
    sock.send(b"junk")
    sock.send_multipart([b"two", b"frames"])
    sock.send(encode(Abort(pack([99], NUMBER))))
    stranger = engine.context.socket(zmq.DEALER)
    stranger.connect(engine.address)
    stranger.send(add(1, 2))
    sock.send(add(6, 1))
    for message in outputs(sock):
        if len(unpack(message.tokens)):
            break
    stranger.close(0)


def test_a_front_end_that_is_gone_has_its_requests_aborted(engine: Engine) -> None:
    first, second = engine.connect(0), engine.connect(1)
    first.send(add(1, 2000))
    for message in outputs(second):
        if message.load.running == 1:
            break
    first.close(0)
    for message in outputs(second):
        if message.load.aborted == 1:
            break
    assert message.load.running == 0


def test_it_leaves_at_once_when_the_launcher_is_gone_and_ignores_terminal_signals(engine: Engine) -> None:
    assert isinstance(engine.lifeline.recv(), ChildReady)
    engine.process.send_signal(signal.SIGINT)
    engine.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert engine.process.poll() is None
    engine.lifeline.close()
    assert engine.process.wait(5) == ExitCode.OK
    engine.context.destroy(0)


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    child = Engine(tmp_path, Settings(model=str(tmp_path / "none.gguf"), executor="simulated"))
    failure = child.lifeline.recv()
    assert isinstance(failure, ChildFailed) and "none.gguf" in failure.message
    assert child.process.wait(20) == failure.exit_code == ExitCode.MODEL
    child.lifeline.close()
    child.context.destroy(0)
