"""The engine dies under streams: they pause, and go on as if nothing had happened (simulated runner)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from servelite.ipc.process import ExitCode
from tests.faults.streams import Told, all_streams, stream
from tests.http.client import connected
from tests.http.server import Server, running_server

SIMULATED = ("--executor", "simulated", "--simulated-step-ms", "10", "--max-num-seqs", "16")
KILLER = 31337


def body(number: int, tokens: int = 100) -> dict[str, Any]:
    """Half greedy, half seeded; some with a stop string."""
    return {
        "model": "demo",
        "prompt": f"request {number}: " + "word " * (number % 40),
        "temperature": number % 2,
        "seed": number,
        "max_tokens": tokens,
        "ignore_eos": True,
        **({"stop": ["e"], "min_tokens": tokens // 2} if number % 4 == 3 else {}),
    }


def kill_engine(server: Server) -> None:
    os.kill(server.child("engine core"), signal.SIGKILL)


async def whole(port: int, bodies: list[dict[str, Any]]) -> list[Told]:
    return await asyncio.gather(*(stream(port, each) for each in bodies))


async def wait_until_ready(server: Server, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while (await asyncio.to_thread(server.get, "/health/ready"))[0] != 200:
        assert time.monotonic() < deadline, server.errors()
        await asyncio.sleep(0.05)


async def test_sixteen_streams_go_on(tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, *SIMULATED) as server:
        bodies = [body(number) for number in range(16)]
        expected = await whole(server.port, bodies)
        assert all(told.done and told.finish_reason for told in expected)
        for deaths in range(2):
            tasks = await all_streams(server.port, bodies)
            kill_engine(server)
            await asyncio.sleep(0.2)
            assert server.get("/health/ready")[0] == 503
            status, refusal = server.post("/v1/completions", body(0))
            assert status == 503 and refusal["error"]["code"] == "engine_not_ready"
            got = await asyncio.gather(*tasks)
            # Of the cache, what the first engine said stays true; the second round hits the first's blocks.
            for mine, theirs in zip(got, expected, strict=True):
                assert mine.usage is not None and theirs.usage is not None
                mine.usage.pop("prompt_tokens_details", None), theirs.usage.pop("prompt_tokens_details", None)
                assert mine.same(theirs), (mine, theirs)
            await wait_until_ready(server)
            now = server.idle_metrics()
            assert now["servelite_engine_restarts_total"] == deaths + 1
            assert now["servelite_requests_resumed_total"] == 16 * (deaths + 1)
        assert now["servelite_requests_quarantined_total"] == 0


@pytest.mark.slow
async def test_choices_that_wait_for_a_prompt_go_on(tmp_path: Path, demo_model: Path) -> None:
    """Killed while the first choice's prompt is computed: the others still wait for it."""
    flags = (*SIMULATED, "--max-num-batched-tokens", "16")
    with running_server(tmp_path, *flags) as server:
        many = {"model": "demo", "prompt": "word " * 600, "n": 4, "seed": 3, "max_tokens": 8}
        async with connected(server.port) as connection:
            expected = (await connection.post("/v1/completions", many)).json()
            task = asyncio.create_task(connection.post("/v1/completions", many | {"cache_salt": "other"}))
            await asyncio.sleep(0.1)
            kill_engine(server)
            got = (await task).json()
        assert got["choices"] == expected["choices"]
        assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        await wait_until_ready(server)
        server.idle_metrics()


@pytest.mark.slow
async def test_a_request_that_kills_is_found_and_the_others_finish(tmp_path: Path, demo_model: Path) -> None:
    flags = (*SIMULATED, "--debug", "--fault-injection", f"crash:token={KILLER}")
    with running_server(tmp_path, *flags) as server:
        bodies = [body(number, 300) for number in range(15)]
        expected = await whole(server.port, bodies)
        tasks = await all_streams(server.port, bodies)
        status, refusal = await asyncio.to_thread(
            server.post, "/v1/completions", {"model": "demo", "prompt": [KILLER], "max_tokens": 5}
        )
        assert status == 500 and refusal["error"]["code"] == "engine_killed_by_request"
        assert "SIGABRT" in refusal["error"]["message"]
        for mine, theirs in zip(await asyncio.gather(*tasks), expected, strict=True):
            assert (mine.text, mine.finish_reason, mine.error) == (theirs.text, theirs.finish_reason, None)
        await wait_until_ready(server)
        assert server.idle_metrics()["servelite_requests_quarantined_total"] == 1


@pytest.mark.slow
async def test_an_error_of_the_engine_is_answered_alike(tmp_path: Path, demo_model: Path) -> None:
    flags = (*SIMULATED, "--debug", "--fault-injection", "error:step=30")
    with running_server(tmp_path, *flags) as server:
        got = await whole(server.port, [body(number) for number in range(4)])
        again = await whole(server.port, [body(number) for number in range(4)])
        assert [told.text for told in got] == [told.text for told in again]
        assert server.idle_metrics()["servelite_engine_restarts_total"] >= 1
        assert "a fault that was asked for" in server.errors()


@pytest.mark.slow
async def test_an_engine_that_hangs_is_replaced(tmp_path: Path, demo_model: Path) -> None:
    """Stopped from outside, as a debugger or a swapping machine does it: not ready, then killed."""
    with running_server(tmp_path, *SIMULATED, "--stall-warning", "0.5", "--hang-timeout", "3") as server:
        bodies = [body(number) for number in range(4)]
        expected = await whole(server.port, bodies)
        tasks = await all_streams(server.port, bodies)
        os.kill(server.child("engine core"), signal.SIGSTOP)
        deadline = time.monotonic() + 2.5 * 5
        while (await asyncio.to_thread(server.get, "/health/ready"))[0] == 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        for mine, theirs in zip(await asyncio.gather(*tasks), expected, strict=True):
            assert (mine.text, mine.error) == (theirs.text, None)
        await wait_until_ready(server)
        assert server.idle_metrics()["servelite_engine_restarts_total"] >= 1
        assert "it hung: no progress for" in server.errors()


@pytest.mark.slow
async def test_an_engine_that_only_pauses_lives_on(tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, *SIMULATED, "--stall-warning", "0.3", "--hang-timeout", "60") as server:
        tasks = await all_streams(server.port, [body(0)])
        engine = server.child("engine core")
        os.kill(engine, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + 15
            while (await asyncio.to_thread(server.get, "/health/ready"))[0] == 200:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert (await tasks[0]).done
        await wait_until_ready(server)
        assert server.child("engine core") == engine
        assert "moves again" in server.errors()


async def test_without_resuming_answers_fail_and_the_engine_comes_back(
    tmp_path: Path, demo_model: Path
) -> None:
    with running_server(tmp_path, *SIMULATED, "--on-engine-failure", "fail") as server:
        (task,) = await all_streams(server.port, [body(0, 500)])
        kill_engine(server)
        told = await task
        assert told.error is not None and told.error["code"] == "engine_dead"
        assert "SIGKILL" in told.error["message"] and not told.done
        await wait_until_ready(server)
        (told,) = await whole(server.port, [body(0, 5)])
        assert told.done


@pytest.mark.slow
async def test_answers_wait_no_longer_than_they_may(tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, *SIMULATED, "--recovery-timeout", "0.01") as server:
        (task,) = await all_streams(server.port, [body(0, 500)])
        kill_engine(server)
        told = await task
        assert told.error is not None and told.error["code"] == "engine_dead"
        await wait_until_ready(server)
        server.idle_metrics()


@pytest.mark.slow
async def test_a_client_that_leaves_during_recovery_is_forgotten(tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, *SIMULATED) as server:
        tasks = await all_streams(server.port, [body(number, 400) for number in range(4)])
        kill_engine(server)
        await asyncio.sleep(0.05)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.gather(*tasks[2:])
        await wait_until_ready(server)
        assert server.idle_metrics()["servelite_requests_resumed_total"] == 2


async def test_a_drain_waits_for_the_new_engine(tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, *SIMULATED) as server:
        bodies = [body(number) for number in range(4)]
        expected = await whole(server.port, bodies)
        tasks = await all_streams(server.port, bodies)
        kill_engine(server)
        server.signal(signal.SIGTERM)
        for mine, theirs in zip(await asyncio.gather(*tasks), expected, strict=True):
            assert (mine.text, mine.error) == (theirs.text, None)
        assert await asyncio.to_thread(server.wait) == ExitCode.OK


@pytest.mark.slow
async def test_an_engine_that_always_dies_ends_the_server(tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, *SIMULATED) as server:
        for _ in range(6):
            if server.process.poll() is not None:
                break
            await wait_until_ready(server)
            kill_engine(server)
            await asyncio.sleep(0.1)
        assert await asyncio.to_thread(server.wait) == ExitCode.CHILD_DIED
        assert (
            server.errors().splitlines()[-1] == "servelite: the engine failed: killed by signal 9 (SIGKILL); "
            "it died too often: 6 times in 10 minutes"
        )


@pytest.mark.slow
async def test_a_step_longer_than_the_time_out_is_no_hang(tmp_path: Path, demo_model: Path) -> None:
    flags = ("--executor", "simulated", "--simulated-step-ms", "4000", "--hang-timeout", "2")
    with running_server(tmp_path, *flags) as server:
        engine = server.child("engine core")
        told = await stream(server.port, body(0, 2))
        assert told.done and told.error is None
        assert server.child("engine core") == engine
