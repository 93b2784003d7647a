"""Twenty thousand requests with random ends: no memory and no descriptors are kept."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.http.client import connected
from tests.http.server import Server, running_server

REQUESTS = 20_000
CLIENTS = 24
WARM_UP = 5_000
GROWTH = 6 << 20  # bytes that a process may grow by in the 15,000 after warm-up: 0.4 kB a request
IDLE_S = 10
FLAGS = (
    *("--executor", "simulated", "--simulated-step-ms", "0", "--max-model-len", "512"),
    *("--num-gpu-blocks-override", "300", "--max-num-seqs", "16"),
)


def resident(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def figures(server: Server) -> dict[int, tuple[int, int]]:
    """(resident bytes, descriptors) of each process."""
    server.idle_metrics()
    return {pid: (resident(pid), descriptors(pid)) for pid in (server.process.pid, *server.children())}


def cpu_ticks(server: Server) -> int:
    """Processor time of all its processes so far."""
    total = 0
    for pid in (server.process.pid, *server.children()):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total


async def run(port: int, rng: random.Random, count: int) -> None:
    left = iter(range(count))

    async def client() -> None:
        for number in left:
            async with connected(port) as connection:
                for _ in range(rng.randrange(1, 4)):  # a few requests a connection
                    stream = rng.random() < 0.5
                    body = {
                        "model": "demo",
                        "prompt": [rng.randrange(1000, 40_000) for _ in range(rng.randrange(1, 60))],
                        "max_tokens": rng.randrange(1, 24),
                        "stream": stream,
                        "n": rng.choice((1, 1, 1, 3)),
                        "seed": number,
                        "stop": ["e"] if rng.random() < 0.2 else [],
                    }
                    await connection.send("/v1/completions", body)
                    if rng.random() < 0.3:  # leave at some point of the answer, or before it
                        await asyncio.sleep(rng.random() * 0.01)
                        break
                    reply = await connection.reply()
                    assert reply.status == 200, reply
                    if next(left, None) is None:
                        break

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_soak_leaks_nothing(tmp_path: Path, demo_model: Path) -> None:
    rng = random.Random(20261129)
    with running_server(tmp_path, *FLAGS) as server:
        await run(server.port, rng, WARM_UP)
        before = figures(server)
        await run(server.port, rng, REQUESTS - WARM_UP)
        after = figures(server)
        metrics = server.metrics()
        assert metrics["servelite_requests_aborted_total"] > REQUESTS / 20
        assert metrics['servelite_request_success_total{finished_reason="length"}'] > REQUESTS / 4
        assert before.keys() == after.keys()
        for pid, (bytes_before, open_before) in before.items():
            bytes_after, open_after = after[pid]
            print(f"{pid}: {bytes_before >> 10} kB then {bytes_after >> 10} kB, {open_after} descriptors")
            assert bytes_after - bytes_before < GROWTH
            assert open_after <= open_before + 2
        # Idle after all that: less than 1 % of a core, for all processes together.
        ticks = cpu_ticks(server)
        await asyncio.sleep(IDLE_S)
        assert cpu_ticks(server) - ticks < IDLE_S * os.sysconf("SC_CLK_TCK") / 100
