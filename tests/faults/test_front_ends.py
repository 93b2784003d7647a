"""Several front ends on one port: who serves whom, what is counted, and what a death costs (simulated)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.faults.streams import all_streams, stream
from tests.faults.test_engine_death import body
from tests.http.server import Server, running_server

FLAGS = ("--executor", "simulated", "--simulated-step-ms", "10", "--max-num-seqs", "64", "--api-workers", "4")


def served(file: Path) -> float:
    """Requests that one front end has counted."""
    families = msgspec.msgpack.decode(file.read_bytes())
    (success,) = (samples for name, _, _, samples in families if name == "servelite_request_success")
    return sum(value for _, _, value in success)


async def counted(server: Server, requests: int) -> dict[str, float]:
    """The metrics, once they say that so many requests were answered; a scrape is a second behind at most.

    Each scrape is on a connection of its own: whoever answers says what all have counted.
    """
    deadline = time.monotonic() + 15
    while True:
        now = await asyncio.to_thread(server.metrics)
        total = sum(v for k, v in now.items() if k.startswith("servelite_request_success_total"))
        assert total <= requests and time.monotonic() < deadline, now
        if total == requests:
            return now
        await asyncio.sleep(0.05)


def connections(pid: int, port: int) -> int:
    """How many clients' connections a front end has."""
    each = psutil.Process(pid).net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in each)


@pytest.mark.slow
async def test_four_front_ends_share_the_work(tmp_path: Path, demo_model: Path) -> None:
    runtime = tmp_path / "r"
    with running_server(tmp_path, *FLAGS, "--runtime-dir", str(runtime)) as server:
        told = await asyncio.gather(*(stream(server.port, body(number, 20)) for number in range(200)))
        assert all(each.done for each in told)

        now = await counted(server, 200)
        assert now["servelite_time_to_first_token_seconds_count"] == 200
        assert now["servelite_generation_tokens_total"] >= sum(len(each.token_ids) for each in told)
        each = [served(file) for file in runtime.glob("*/metrics-*")]
        assert len(each) == 4 and sum(count > 0 for count in each) >= 2 and max(each) < 200, each

        # A client's connection is one front end's; a killed one costs the others nothing.
        tasks = await all_streams(server.port, [body(number, 200) for number in range(32)])
        victim = server.child("front end 2")
        own = connections(victim, server.port)
        assert not any(task.done() for task in tasks)
        os.kill(victim, signal.SIGKILL)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        cut = [end for end in ends if isinstance(end, BaseException)]
        assert all(isinstance(end, (ConnectionError, asyncio.IncompleteReadError, ValueError)) for end in cut)
        assert len(cut) == own < 32
        assert all(end.done for end in ends if not isinstance(end, BaseException))
        deadline = time.monotonic() + 15
        while "front end 2 died" not in server.errors() or len(server.children()) < 5:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert (await stream(server.port, body(1, 5))).done
        server.idle_metrics()  # its requests were aborted in the engine
        await counted(server, 200 + 32 - own + 1)  # what it had counted before stays counted
