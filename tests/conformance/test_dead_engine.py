"""A dead or frozen engine is seen from outside."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.conformance.sse import read_events
from tests.conformance.target import COMPLETIONS, GREEDY, Target, error_of, given_url, together
from tests.http.server import running_server

LONG = {"prompt": "a", "max_tokens": 300, "ignore_eos": True} | GREEDY
SIMULATED = ("--executor", "simulated", "--simulated-step-ms", "10")


@pytest.fixture
def own_servers() -> None:
    if given_url():
        pytest.skip("needs servers of its own")


def _running(target: Target, count: int) -> None:
    deadline = time.monotonic() + 10
    while target.metric("num_requests_running") < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_hlt_02_a_killed_engine_is_seen(tmp_path: Path, demo_model: Path, own_servers: None) -> None:
    """HLT-02, kill, with `--on-engine-failure fail`: everyone is told, and nobody waits."""
    with running_server(tmp_path, *SIMULATED, "--on-engine-failure", "fail") as server:
        target = Target(server.url, own=server)
        body = {"model": target.model} | LONG | {"max_tokens": 2000}

        def ask(stream: bool) -> httpx.Response:
            with httpx.Client(base_url=target.url, timeout=30) as client:
                return client.post(COMPLETIONS, json=body | {"stream": stream})

        def kill() -> tuple[float, int]:
            _running(target, 4)
            os.kill(server.child("engine core"), signal.SIGKILL)
            begun = time.monotonic()
            return begun, _health(target, 503, 10)

        killed, *replies = together([kill, *[lambda: ask(False)] * 2, *[lambda: ask(True)] * 2])
        begun, status = killed  # type: ignore[misc]
        assert time.monotonic() - begun < 10 and status in (503, 0)
        for reply in replies:
            assert isinstance(reply, httpx.Response)
            if reply.headers["content-type"].startswith("text/event-stream"):
                events = read_events(reply.content)
                assert events.error is not None and not events.done
            else:
                assert reply.status_code >= 500
                error_of(reply)
        asked = time.monotonic()
        try:
            assert target.post(COMPLETIONS, LONG).status_code >= 500
        except httpx.TransportError:
            pass
        assert time.monotonic() - asked < 5
        assert _health(target, 200, 30) == 200  # as documented: a new engine takes the old one's place
        assert target.plain(COMPLETIONS, LONG | {"max_tokens": 4}).counts["completion_tokens"] == 4
        target.close()


def _health(target: Target, wanted: int, seconds: float) -> int:
    """The status of /health, once it is the one wanted or the port is closed (0)."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            status = target.get("/health").status_code
        except httpx.TransportError:
            return 0
        if status == wanted or time.monotonic() > deadline:
            return status
        time.sleep(0.05)


@pytest.mark.slow
def test_hlt_02_a_frozen_engine_is_seen(tmp_path: Path, demo_model: Path, own_servers: None) -> None:
    """HLT-02, freeze, with `--hang-timeout 120`: unhealthy within the watchdog's time, and well again."""
    flags = ("--hang-timeout", "120", "--stall-warning", "2")
    with running_server(tmp_path, *SIMULATED, *flags) as server:
        target = Target(server.url, own=server)
        expected = target.plain(COMPLETIONS, LONG).text

        def freeze() -> None:
            _running(target, 1)
            engine = server.child("engine core")
            os.kill(engine, signal.SIGSTOP)
            try:
                assert _health(target, 503, 5) == 503
                time.sleep(58)
                assert target.get("/health").status_code == 503
                assert target.get("/v1/models").status_code == 200  # which is no proof of health
            finally:
                os.kill(engine, signal.SIGCONT)
            assert _health(target, 200, 5) == 200

        got, _ = together([lambda: target.stream(COMPLETIONS, LONG).text, freeze])
        assert got == expected
        target.check_alive()
        target.close()
