"""`servelite bench`, as a shell runs it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servelite.ipc.process import ExitCode
from tests.bench.fake_server import Script, event, fake_server, words
from tests.http.server import running_server
from tests.tiny_models import tiny_llama

COMMAND = (sys.executable, "-m", "servelite", "bench")
STEP_MS = 20


def run(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def test_a_server_of_known_speed(tmp_path: Path, demo_model: Path) -> None:
    file = tmp_path / "figures.json"
    flags = ("--executor", "simulated", "--simulated-step-ms", str(STEP_MS))
    with running_server(tmp_path, *flags) as server:
        answer = run(
            "serve", "--url", server.url, "--concurrency", "1", "4", "--num-requests", "4", "--seed", "5",
            "--input-len", "40", "--output-len", "10", "--json", str(file),
        )  # fmt: skip
        after = server.idle_metrics()
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "1 stream: 4 completed, 0 failed" in answer.stdout and "TTFT p50" in answer.stdout
    written = json.loads(file.read_text())
    assert (written["benchmark"], written["interrupted"]) == ("serve", False)
    assert written["asked"]["seed"] == 5 and written["asked"]["input_len"] == "40"
    for level, streams in zip(written["results"], (1, 4), strict=True):
        assert (level["streams"], level["completed"], level["failed"]) == (streams, 4, 0)
        assert level["output_tokens"] == 40 and level["prompt_tokens"] == pytest.approx(160, abs=4)
        assert STEP_MS <= level["ttft_ms"]["p50"] < 10 * STEP_MS
        assert 0.9 * STEP_MS < level["tpot_ms"]["p50"] < 5 * STEP_MS
        assert level["e2e_ms"]["p50"] > 9 * STEP_MS
        assert 0 < level["output_tokens_per_s"] <= streams * 1000 / STEP_MS
        assert set(level["itl_ms"]) == {"count", "mean", "p50", "p90", "p99", "max"}
    one, four = (level["output_tokens_per_s"] for level in written["results"])
    assert four > 1.5 * one
    assert after["servelite_num_requests_running"] == 0


def test_failures_show_in_the_exit_code() -> None:
    with fake_server(Script(words, statuses={1: 503})) as url:
        answer = run("serve", "--url", url, "--concurrency", "1", "--num-requests", "3", "--warmup", "0")
    assert answer.returncode == ExitCode.INTERNAL
    assert "2 completed, 1 failed" in answer.stdout and "failed 1 x: status 503" in answer.stdout
    assert answer.stderr == "servelite: some requests failed\n"


def test_an_interrupt_leaves_figures_behind(tmp_path: Path) -> None:
    def endless(body: dict[str, Any], number: int) -> Iterator[str | float]:
        if number == 5:
            os.kill(process.pid, signal.SIGINT)
        while number >= 5:
            yield event("a")
            yield 0.01
        yield from words(body)

    file = tmp_path / "figures.json"
    with fake_server(Script(endless)) as url:
        command = [*COMMAND, "serve", "--url", url, "--concurrency", "1", "--json", str(file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "1 completed, 0 failed, 1 unfinished" in out
    assert errors == "servelite: interrupted: the figures are of what was measured until then\n"
    written = json.loads(file.read_text())
    assert written["interrupted"] and written["results"][0]["unfinished"] == 1


def test_an_interrupt_leaves_the_engines_figures_behind(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ("--executor", "simulated", "--batch", "1", "2", "--steps", "200", "--json", str(file))
    process = subprocess.Popen(
        [*COMMAND, "engine", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(3):  # up to the first batch's figures; the second's take 2,000 steps
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT and errors.startswith("servelite: interrupted")
    (result,) = json.loads(file.read_text())["results"]
    assert result["batch"] == 1


def test_progress_is_for_terminals_only() -> None:
    def slow(body: dict[str, Any], number: int) -> Iterator[str | float]:
        yield 0.5
        yield from words(body)

    with fake_server(Script(slow)) as url:
        command = [*COMMAND, "serve", "--url", url, "--concurrency", "2", "--num-requests", "4"]
        ours, theirs = pty.openpty()
        try:
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, timeout=60, check=True)
            shown = os.read(ours, 1 << 16).decode()
        finally:
            os.close(ours)
            os.close(theirs)
        assert "2 streams [" in shown and "/4 requests, 2 in flight" in shown
        assert run(*command[4:]).stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve --concurrency 0", "'0' is no whole number from 1 on"),
        ("serve --request-rate nan", "'nan' is no number above 0"),
        ("serve --concurrency 1 --request-rate 1", "not allowed with"),
        ("serve --num-requests 1 --duration 1", "not allowed with"),
        ("serve --input-len 9:3", "lower end"),
        ("serve --body [1]", "no JSON object"),
        ("serve --body {", "no JSON"),
        ("serve --json /nowhere/at/all.json", "--json /nowhere/at/all.json"),
        ("serve --request-rate 1 --long-prompt 9", "--concurrency"),
        ("serve --url http://127.0.0.1:1", "http://127.0.0.1:1/v1/models got no answer"),
        ("engine no-such-model --batch 1 --steps 1", "no-such-model"),
        ("engine --batch 0", "'0' is no whole number from 1 on"),
        ('engine --sampling {"heat":1}', "'heat' is none of max_tokens, temperature"),
        ('engine --sampling {"temperature":"warm"}', "--sampling: Expected `float`"),
        ("engine --executor none", "--executor is 'none'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: str, said: str) -> None:
    answer = run(*arguments.split())
    assert answer.returncode in (ExitCode.SETTING, ExitCode.MODEL)
    (line,) = answer.stderr.splitlines()
    assert line.startswith("servelite: ") and said in line


@pytest.mark.slow
def test_the_engine_on_a_tiny_model(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    file = tmp_path / "figures.json"
    answer = run(
        "engine", str(tmp_path), "--batch", "1", "4", "--context", "20", "--steps", "3", "--json", str(file),
        "--sampling", '{"temperature": 1, "top_p": 0.9, "logprobs": 2}',
    )  # fmt: skip
    assert (answer.returncode, answer.stderr) == (0, "")
    results = json.loads(file.read_text())["results"]
    assert [(r["part"], r["batch"]) for r in results] == [
        ("loop", 1),
        ("loop", 4),
        ("runner", 1),
        ("runner", 4),
    ]
    assert all(r["forward_ms"] > 0 for r in results[2:])
    answer = run("engine", str(tmp_path), "--batch", "1", "--context", "600", "--steps", "1")
    assert answer.returncode == ExitCode.SETTING
    assert answer.stderr == (
        "servelite: --context 600 and --steps 1 make 603 tokens, the model takes 512: lower them\n"
    )


def test_the_simulated_executor_needs_no_model(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    answer = run(
        "engine", "no-such-model", "--executor", "simulated", "--batch", "2", "--context", "5",
        "--steps", "1", "--json", str(file),
    )  # fmt: skip
    assert (answer.returncode, answer.stderr) == (0, "")
    (result,) = json.loads(file.read_text())["results"]
    assert (result["part"], result["batch"]) == ("loop", 2) and result["schedule_us"] > 0


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom servelite.cli import main\n"
        "for what in ('serve', 'engine'):\n"
        "    try: main(['bench', what, '--help'])\n"
        "    except SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'zmq', 'msgspec', 'uvloop') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        answer.stdout.endswith("[]\n") and "--request-rate" in answer.stdout and "--context" in answer.stdout
    )
