"""A running `servelite serve` for tests: a free port, a runtime folder of its own, ended by its PID."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_S = 60.0
END_S = 30.0


@dataclass
class Server:
    """The launcher's process and where it listens."""

    process: subprocess.Popen[str]
    log: Path
    port: int = 0

    @property
    def pid(self) -> int:
        """The launcher's."""
        return self.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, timeout: float = 30.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def get(self, path: str) -> tuple[int, bytes]:
        connection = self.connect()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        connection = self.connect()
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.load(answer)
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`, labels in its name; but for the model's name, which all have."""
        text = re.sub(r'(?<=[{,])model_name="[^"]*",?', "", self.get("/metrics")[1].decode())
        lines = text.replace(",}", "}").replace("{}", "").splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def idle_metrics(self, seconds: float = 5.0) -> dict[str, float]:
        """`metrics`, once nothing runs and every block is free."""
        deadline = time.monotonic() + seconds
        while True:
            now = self.metrics()
            running = now["servelite_num_requests_running"] + now["servelite_num_requests_waiting"]
            if not running and now["servelite_kv_blocks_free"] == now["servelite_kv_blocks_total"]:
                return now
            assert time.monotonic() < deadline, now
            time.sleep(0.02)

    def children(self) -> list[int]:
        """PIDs of the processes that the launcher started."""
        words = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(child) for child in words]

    def child(self, title: str) -> int:
        """The PID of the child that `ps` shows as `servelite: title`."""
        wanted = f"servelite: {title}"
        found = [p for p in self.children() if Path(f"/proc/{p}/cmdline").read_text().startswith(wanted)]
        assert len(found) == 1, found
        return found[0]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = END_S) -> int:
        """The exit code, once the launcher has ended."""
        return self.process.wait(timeout)

    def errors(self) -> str:
        """Standard error so far, start-up's ledger apart."""
        lines = self.log.read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("servelite: start-up: "))


def start_server(folder: Path, *flags: str, model: str = "demo") -> Server:
    """Start one without waiting for it; the caller ends it."""
    log = folder / f"server-{time.monotonic_ns()}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "servelite", "serve", model, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    return Server(process, log)


def wait_ready(server: Server) -> str:
    """Wait for the line that says where it serves, and return it."""
    assert server.process.stdout is not None
    readable, _, _ = select.select([server.process.stdout], [], [], READY_S)
    line = server.process.stdout.readline() if readable else ""
    found = re.search(r"https?://\S+:(\d+)", line)
    if found is None:
        end(server)
        raise AssertionError(f"no server after {READY_S} s: {line!r} {server.errors()}")
    server.port = int(found[1])
    return line


def end(server: Server) -> None:
    """End it by its PID, harder if it does not go."""
    if server.process.poll() is None:
        server.signal(signal.SIGINT)
        try:
            server.wait()
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
    if server.process.stdout is not None:
        server.process.stdout.close()


@contextmanager
def running_server(folder: Path, *flags: str, model: str = "demo") -> Iterator[Server]:
    """A server that is ready."""
    server = start_server(folder, *flags, model=model)
    try:
        wait_ready(server)
        yield server
    finally:
        end(server)
