"""`docker/nginx.conf` under Debian's nginx: streams, retries, limits, and what it says itself."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from servelite.config import Settings
from tests.docker.nginx import CONF, Nginx, free_port, running_nginx
from tests.http.server import Server, running_server

STEP_MS = 50
HEADERS = {"content-type": "application/json"}
BODY = {"model": "demo", "prompt": "x", "max_tokens": 10, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("replica")
    flags = ("--executor", "simulated", "--simulated-step-ms", str(STEP_MS))
    with running_server(folder, *flags) as made:
        yield made


@pytest.fixture
def nginx(server: Server) -> Iterator[Nginx]:
    """Before the server and a second replica, of which only the port is there."""
    with running_nginx((free_port(), server.port)) as made:
        yield made


@contextmanager
def ask(
    nginx: Nginx, method: str, path: str, body: bytes | None = None, **headers: str
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", nginx.port, timeout=30)
    try:
        connection.request(method, path, body, HEADERS | headers)
        yield connection.getresponse()
    finally:
        connection.close()


def test_each_token_leaves_at_once(nginx: Nginx) -> None:
    with ask(nginx, "POST", "/v1/completions", json.dumps(BODY | {"stream": True}).encode()) as answer:
        times = []
        while line := answer.readline():
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
    assert line == b"" and len(times) >= 10
    assert times[-1] - times[0] > 0.5 * 9 * STEP_MS / 1000  # buffered, they would come at one moment


def test_a_request_id_goes_in_and_out(nginx: Nginx) -> None:
    for path in ("/v1/models", "/v1/nothing"):
        with ask(nginx, "GET", path, **{"X-Request-Id": "mine-1"}) as answer:
            assert answer.headers.get_all("x-request-id") == ["mine-1"]
    with ask(nginx, "GET", "/v1/models") as answer:
        made = answer.headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", made)
    nginx.wait_logged(f"id={made} upstream=")


def test_a_body_may_be_as_large_as_the_servers(nginx: Nginx) -> None:
    limit = Settings().max_body_bytes
    assert f"client_max_body_size {limit >> 20}m;" in CONF.read_text()
    for size, status, code in ((limit, 400, "invalid_json"), (limit + 1, 413, "body_too_large")):
        with ask(nginx, "POST", "/v1/completions", b"x" * size) as answer:
            error = json.load(answer)["error"]
            assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
            assert error["code"] == code and error["type"] == "invalid_request_error"


def test_a_client_that_leaves_is_gone_for_the_replica_too(nginx: Nginx, server: Server) -> None:
    long = json.dumps(BODY | {"max_tokens": 1000, "stream": True}).encode()
    with ask(nginx, "POST", "/v1/completions", long) as answer:
        assert answer.readline().startswith(b"data: ")
    server.idle_metrics()


def test_metrics_are_not_public(nginx: Nginx) -> None:
    with ask(nginx, "GET", "/metrics") as answer:
        assert answer.status == 404
    with ask(nginx, "GET", "/health/ready") as answer:
        assert answer.status == 200


class StandIn(ThreadingHTTPServer):
    """A replica that gives one answer (200 after `refusals` of them).

    It notes what it was sent, and on how many connections.
    """

    daemon_threads = True

    def __init__(self, status: int, port: int) -> None:
        self.bodies: list[bytes] = []
        self.refusals: int | None = None
        self.connections = 0
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                stand_in.connections += 1

            def do_POST(self) -> None:
                stand_in.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                text = b'{"replica": true}'
                recovered = stand_in.refusals is not None and len(stand_in.bodies) > stand_in.refusals
                self.send_response(200 if recovered else status)
                self.send_header("content-length", str(len(text)))
                self.send_header("retry-after", "7")
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", port), Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])


@contextmanager
def stand_in(status: int, port: int = 0) -> Iterator[StandIn]:
    made = StandIn(status, port)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def test_a_503_and_a_dead_replica_cost_nothing_but_a_second_try() -> None:
    body = b'{"prompt": "' + b"x" * 100_000 + b'"}'  # more than nginx keeps in memory
    with stand_in(200) as good, stand_in(503) as bad:
        for other in (bad.port, free_port()):
            with running_nginx((other, good.port)) as nginx:
                for _ in range(12):
                    with ask(nginx, "POST", "/v1/completions", body) as answer:
                        assert answer.status == 200 and answer.read() == b'{"replica": true}'
        assert bad.bodies and set(bad.bodies) == set(good.bodies) == {body}
        assert good.connections < 12  # of 24 requests: they are kept


def test_what_a_full_replica_says_reaches_the_client() -> None:
    with (
        stand_in(503) as one,
        stand_in(503) as two,
        running_nginx((one.port, two.port)) as nginx,
        ask(nginx, "POST", "/v1/completions", b"{}") as answer,
    ):
        assert (answer.status, answer.headers["retry-after"]) == (503, "7")
        assert answer.read() == b'{"replica": true}'


def test_two_that_refuse_are_asked_again() -> None:
    """One loads, and is ready just when the other begins to drain: both have said 503, and one can serve."""
    with stand_in(503) as loading, stand_in(503) as draining:
        loading.refusals = 1
        with running_nginx((loading.port, draining.port)) as nginx, ask(nginx, "POST", "/", b"{}") as answer:
            assert answer.status == 200


def test_a_replica_that_came_back_is_not_left_out_when_it_is_needed() -> None:
    """nginx alone sends it one request each 2 s until one is over, and has nobody for the others."""
    port = free_port()
    with stand_in(503) as full, running_nginx((port, full.port)) as nginx:
        for _ in range(12):  # now neither counts as alive
            with ask(nginx, "POST", "/v1/completions", b"{}") as answer:
                assert answer.status == 503
        with stand_in(200, port):
            for _ in range(6):
                with ask(nginx, "POST", "/v1/completions", b"{}") as answer:
                    assert answer.status == 200


def test_no_replica_at_all_is_a_503_to_come_back_from() -> None:
    with (
        running_nginx((free_port(), free_port())) as nginx,
        ask(nginx, "POST", "/v1/completions", b"{}", **{"X-Request-Id": "mine-2"}) as answer,
    ):
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["x-request-id"] == "mine-2"
        assert json.load(answer)["error"]["code"] == "no_replica"
