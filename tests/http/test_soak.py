"""Twenty thousand requests with random ends: no memory and no descriptors are kept."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.http.client import connected
from tests.http.server import Server, running_server

REQUESTS = 20_000
CLIENTS = 24
WARM_UP = 5_000
SAMPLES = 10  # of memory, evenly spaced over what comes after warm-up
SLOPE = 400  # bytes a request that a process may grow by after warm-up, by least squares
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
    """(resident bytes, descriptors) of each process, when nothing runs and all blocks are free."""
    server.idle_metrics()
    return {pid: (resident(pid), descriptors(pid)) for pid in (server.process.pid, *server.children())}


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")


def slope(values: Sequence[float], apart: float) -> float:
    """Of the straight line that comes closest to `values`, which are `apart` from one another."""
    return float(np.polyfit(np.arange(len(values)) * apart, values, 1)[0])


def cpu_ticks(server: Server) -> int:
    """Processor time of all its processes so far."""
    total = 0
    for pid in (server.process.pid, *server.children()):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total


def wake_ups(server: Server) -> int:
    """How often its threads have gone to sleep so far."""
    total = 0
    for pid in (server.process.pid, *server.children()):
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            total += int(status.read_text().split("voluntary_ctxt_switches:")[1].split()[0])
    return total


async def run(port: int, rng: random.Random, count: int) -> None:
    """`count` requests; one that is told that there is no engine is sent again."""
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
                    while (reply := await connection.reply()).status == 503:
                        assert reply.json()["error"]["code"] == "engine_not_ready"
                        await asyncio.sleep(0.1)
                        await connection.send("/v1/completions", body)
                    assert reply.status == 200, reply
                    if next(left, None) is None:
                        break

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_soak_leaks_nothing(tmp_path: Path, demo_model: Path) -> None:
    rng = random.Random(20261129)
    apart = (REQUESTS - WARM_UP) // SAMPLES
    with running_server(tmp_path, *FLAGS) as server:
        await run(server.port, rng, WARM_UP)
        samples = [figures(server)]
        for _ in range(SAMPLES):
            await run(server.port, rng, apart)
            samples.append(figures(server))
        metrics = server.metrics()
        assert metrics["servelite_requests_aborted_total"] > REQUESTS / 20
        assert metrics['servelite_request_success_total{finished_reason="length"}'] > REQUESTS / 4
        assert metrics["servelite_engine_restarts_total"] == 0
        assert all(sample.keys() == samples[0].keys() for sample in samples)
        for pid, (bytes_before, open_before) in samples[0].items():
            bytes_after, open_after = samples[-1][pid]
            grows = slope([sample[pid][0] for sample in samples], apart)
            print(
                f"{title(pid)}: {grows:+.1f} bytes a request, {bytes_before >> 10} kB then "
                f"{bytes_after >> 10} kB, {open_before} descriptors then {open_after}"
            )
            assert grows < SLOPE
            assert open_after <= open_before + 2
        await check_idle(server)
        await check_after_a_death(server, rng)


async def check_idle(server: Server) -> None:
    """Idle after all that: less than 1 % of a core, for all processes together; here five times that. What
    wakes is the launcher, every two seconds, to look at the engine."""
    ticks, woken = cpu_ticks(server), wake_ups(server)
    await asyncio.sleep(IDLE_S)
    assert wake_ups(server) - woken < IDLE_S
    assert cpu_ticks(server) - ticks < 5 * IDLE_S * os.sysconf("SC_CLK_TCK") / 100


async def check_after_a_death(server: Server, rng: random.Random) -> None:
    """The engine dies under them: all blocks of the next are free at the end, and no descriptor is kept."""
    dead = server.child("engine core")
    before = figures(server)
    requests = asyncio.create_task(run(server.port, rng, 1000))
    await asyncio.sleep(0.5)
    os.kill(dead, signal.SIGKILL)
    await requests
    after = figures(server)
    assert server.metrics()["servelite_engine_restarts_total"] == 1
    for pid in after.keys() & before.keys():
        print(f"{title(pid)}: {before[pid][1]} descriptors then {after[pid][1]}, after a death of the engine")
        assert after[pid][1] <= before[pid][1] + 2
    (engine,) = after.keys() - before.keys()
    assert after[engine][1] <= before[dead][1] + 2


def test_a_slope_is_seen() -> None:
    noise = random.Random(1)
    assert slope([noise.random() * 1e5 for _ in range(11)], 1500) < SLOPE
    assert slope([at * 1500 * 500 + noise.random() * 1e5 for at in range(11)], 1500) > SLOPE
