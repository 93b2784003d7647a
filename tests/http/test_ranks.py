"""A server of several ranks: what it answers, what it refuses at the start, and what it costs when idle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from servelite import LLM
from servelite.ipc.process import ExitCode
from servelite.llm import EngineFailed
from tests.http.server import end, running_server, start_server
from tests.http.test_soak import cpu_ticks

SIMULATED = ("--executor", "simulated", "--simulated-step-ms", "0")
IDLE_S = 4


def test_answers_are_those_of_one_rank_and_idling_costs_nothing(tmp_path: Path, demo_model: Path) -> None:
    body = {"model": "demo", "prompt": "a b c", "max_tokens": 40, "seed": 1, "n": 2}
    with running_server(tmp_path, *SIMULATED) as server:
        expected = server.post("/v1/completions", body)[1]["choices"]
    with running_server(tmp_path, *SIMULATED, "--tp", "3", "--async-depth", "2") as server:
        assert [server.child(f"worker {rank}") for rank in range(3)]
        assert server.post("/v1/completions", body)[1]["choices"] == expected
        server.idle_metrics()
        ticks = cpu_ticks(server)
        time.sleep(IDLE_S)
        # Of a core, 1 % for six processes; the test allows five times that.
        assert cpu_ticks(server) - ticks < IDLE_S * os.sysconf("SC_CLK_TCK") * 0.05


@pytest.mark.real_model
def test_a_model_that_cannot_be_divided_is_refused(tmp_path: Path, demo_model: Path) -> None:
    server = start_server(tmp_path, "--tp", "2")
    try:
        assert server.wait(60) == ExitCode.SETTING
        assert server.errors().splitlines()[-1] == (
            "servelite: --tp is 2, which does not divide the model's num_attention_heads 9; it can be 1 or 3"
        )
    finally:
        end(server)


def test_no_room_for_its_processes_is_one_line(tmp_path: Path, demo_model: Path) -> None:
    command = [sys.executable, "-m", "servelite", "serve", "demo", "--port", "0", *SIMULATED, "--tp", "8"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 60; exec "$@"', "sh", *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == ExitCode.INTERNAL
    assert done.stderr == (
        "servelite: no room for its processes: Too many open files; "
        "raise the limits on them (ulimit -n, -u)\n"
    )


def test_a_rank_of_a_library_dies(demo_model: Path) -> None:
    with LLM(str(demo_model), executor="simulated", simulated_step_ms=5, tp=2) as llm:
        assert len(llm.generate("x", max_tokens=5, ignore_eos=True)[0].token_ids) == 5
        engine = llm._backend._engine
        assert engine is not None
        stream = llm.stream_chat([{"role": "user", "content": "hi"}])
        next(stream)
        os.kill(engine.members[2].pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"worker 1: killed by signal 9"):
            for _ in stream:
                pass
        assert not engine.alive
