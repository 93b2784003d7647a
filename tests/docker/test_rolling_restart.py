"""Two replicas behind nginx, restarted one after the other under constant streams: nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from servelite.ipc.process import ExitCode
from tests.docker.nginx import free_port, running_nginx
from tests.http.client import Connection, connected
from tests.http.server import Server, end, start_server, wait_ready

STREAMS: Final = 8
TOPICS: Final = ("Paris", "Water", "Music", "Gravity", "An apple", "The moon", "A whale", "Chess")
NGINX_KEEPS: Final = 1000  # requests on a connection: nginx's default
DRAIN: Final = ("--drain-timeout", "60")


@dataclass
class Load:
    """Streams, one after the other on each of some connections; every answer is looked at."""

    port: int
    body: dict[str, Any]
    expected: dict[int, str] = field(default_factory=dict)
    whole: Counter[int] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    stopping: bool = False

    async def stream(self, connection: Connection, number: int) -> str:
        """One answer's text; what was wrong with it goes to `broken`."""
        prompt = f"{TOPICS[number]} is"
        await connection.send("/v1/completions", self.body | {"prompt": prompt, "stream": True})
        status, headers = await connection.head()
        if status != 200:
            self.broken.append(f"status {status}")
            raise ConnectionError(f"status {status}, {headers}")
        events = b"".join([chunk async for chunk in connection.chunks()]).decode()
        if not events.endswith("data: [DONE]\n\n"):
            self.broken.append(f"no [DONE]: {events[-300:]}")
        lines = [line[6:] for line in events.splitlines() if line.startswith("data: {")]
        return "".join(choice["text"] for line in lines for choice in json.loads(line).get("choices", ()))

    async def run(self, number: int) -> None:
        """One constant stream, on a connection that is kept as long as nginx keeps one."""
        try:
            while not self.stopping:
                async with connected(self.port) as connection:
                    for _ in range(NGINX_KEEPS):
                        text = await self.stream(connection, number)
                        if text != self.expected.setdefault(number, text):
                            self.broken.append(f"{text!r} is not {self.expected[number]!r}")
                        self.whole[number] += 1
                        if self.stopping:
                            break
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            self.broken.append(f"stream {number}: {error!r}")

    async def rounds(self, count: int) -> None:
        """Until each stream has had `count` more answers."""
        start = Counter(self.whole)
        while any(self.whole[n] - start[n] < count for n in range(STREAMS)) and not self.broken:
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def constant_streams(load: Load) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(load.run(number)) for number in range(STREAMS)]
    try:
        yield
        load.stopping = True
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class Replicas:
    """Two servers on ports that stay theirs."""

    def __init__(self, folder: Path, flags: tuple[str, ...]) -> None:
        self._folder, self._flags = folder, flags
        self.ports = (free_port(), free_port())
        self._servers: list[Server] = []

    def __enter__(self) -> Replicas:
        with contextlib.ExitStack() as undo:
            undo.push(self.__exit__)
            for port in self.ports:
                self._servers.append(self._start(port))
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            end(server)

    def _start(self, port: int) -> Server:
        server = start_server(self._folder, *self._flags, "--port", str(port))
        wait_ready(server)
        return server

    def restart(self, index: int) -> None:
        """As an orchestrator does it: SIGTERM, wait for the end, start anew, wait until it is ready."""
        server = self._servers[index]
        server.signal(signal.SIGTERM)
        assert server.wait(90) == ExitCode.OK
        assert server.errors().splitlines()[-1] == "servelite: drained: no answers were cut"
        end(server)
        self._servers[index] = self._start(self.ports[index])


def restart_both(folder: Path, body: dict[str, Any], *flags: str) -> None:
    with Replicas(folder, (*DRAIN, *flags)) as replicas, running_nginx(replicas.ports) as nginx:
        load = Load(nginx.port, body)

        async def run() -> None:
            async with constant_streams(load):
                await load.rounds(1)
                for index in range(2):
                    await asyncio.to_thread(replicas.restart, index)
                    assert not load.broken
                await load.rounds(1)

        asyncio.run(run())
        assert load.broken == []
        nginx.wait_logged("upstream=", load.whole.total())
        lines = nginx.access_log().splitlines()
        statuses = [line.split('" ')[1].split()[0] for line in lines]
        assert statuses == ["200"] * load.whole.total()
        served = {re.findall(r"127\.0\.0\.1:(\d+)", line.split("upstream=")[1])[-1] for line in lines}
        assert served == {str(port) for port in replicas.ports}
        assert len(set(load.expected.values())) > 1  # the streams are not all alike


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_the_simulated_executor(tmp_path: Path, demo_model: Path) -> None:
    body = {"model": "demo", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    restart_both(tmp_path, body, "--executor", "simulated", "--simulated-step-ms", "20")


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_with_the_real_model(tmp_path: Path, demo_model: Path) -> None:
    body = {"model": "demo", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    small = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(128 << 20))
    restart_both(tmp_path, body, "--drain-delay", "1", *small)
