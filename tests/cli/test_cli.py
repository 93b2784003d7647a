"""The commands, as a shell runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import servelite
from servelite.cli import env
from servelite.ipc.process import ExitCode
from tests.http.server import running_server

SIMULATED = ("--executor", "simulated")


def run(*arguments: str, stdin: str = "", timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "servelite", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def script(tmp_path: Path) -> str:
    lines = [{"prompt": "Hello", "text": "Hi there."}, {"prompt": "Count.", "text": "one two three"}]
    path = tmp_path / "script.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_version_is_told_at_once() -> None:
    best = 9.9
    for _ in range(5):  # the fastest of a few: other programs run on this machine
        started = time.monotonic()
        answer = run("--version")
        best = min(best, time.monotonic() - started)
        assert answer.stdout == f"servelite {servelite.__version__}\n"
    assert best < 0.2


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    answer = run("--help")
    assert answer.returncode == 0
    assert all(word in answer.stdout for word in ("serve", "chat", "env"))
    code = (
        "import sys\nfrom servelite.cli import main\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'fastapi', 'zmq') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.endswith("[]\n") and "--max-num-seqs" in answer.stdout


def test_a_command_is_required() -> None:
    answer = run()
    assert answer.returncode == 2 and "COMMAND" in answer.stderr


def test_env() -> None:
    names = [name for name, _ in env.report()]
    assert len(set(names)) == len(names)
    answer = run("env")
    assert answer.returncode == 0
    told = dict(line.split(": ", 1) for line in answer.stdout.splitlines())
    assert told["servelite"] == servelite.__version__
    assert told["python"].startswith(sys.version.split()[0])
    assert {"cpu", "memory", "gpu", "torch", "cgroup memory.max"} <= set(told)


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} -m servelite env | true"
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert answer.stderr == ""


def test_chat_with_an_engine_of_its_own(script: str, demo_model: Path) -> None:
    answer = run("chat", *SIMULATED, "--simulated-script", script, stdin="Hello\n\nCount.\n/exit\nHello\n")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "Hi there.\none two three\n", "")


def test_chat_with_a_server(script: str, tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, *SIMULATED, "--simulated-script", script) as server:
        for url in (server.url, f"{server.url}/v1/", server.url.removeprefix("http://")):
            answer = run("chat", "--url", url, stdin="Hello\n/clear\nCount.\n")
            assert (answer.returncode, answer.stdout, answer.stderr) == (0, "Hi there.\none two three\n", "")
        answer = run("chat", "other", "--url", server.url, stdin="Hello\n")
        assert answer.returncode != 0 and "other" in answer.stderr and "Traceback" not in answer.stderr
        answer = run("chat", "--url", server.url, "--temperature", "9", stdin="Hello\n")
        assert answer.returncode != 0 and "temperature" in answer.stderr


def test_chat_with_a_server_that_asks_for_a_key(script: str, tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, *SIMULATED, "--simulated-script", script, "--api-key", "k") as server:
        answer = run("chat", "--url", server.url, "--api-key", "k", stdin="Hello\n")
        assert (answer.returncode, answer.stdout, answer.stderr) == (0, "Hi there.\n", "")
        answer = run("chat", "--url", server.url, stdin="Hello\n")
        assert answer.returncode == ExitCode.SETTING and "Incorrect API key" in answer.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--url", "http://127.0.0.1:1"), ("--url", "ftp://x"), ("missing.gguf",), ("--max-num-seqs", "0")],
)
def test_chat_that_cannot_begin_says_why(arguments: tuple[str, ...]) -> None:
    answer = run("chat", *arguments, stdin="Hello\n")
    assert answer.returncode == ExitCode.SETTING
    (line,) = answer.stderr.splitlines()
    assert line.startswith("servelite: ")


def test_ctrl_c_ends_an_answer_and_not_the_chat(demo_model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "servelite", "chat", *SIMULATED, "--simulated-step-ms", "50"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("Talk for long\n")
        process.stdin.flush()
        assert process.stdout.read(1)  # it has begun
        os.kill(process.pid, signal.SIGINT)
        process.stdin.write("Talk again\n")
        process.stdin.flush()
        rest = process.stdout.readline()
        assert rest.endswith("\n") and process.stdout.read(1)
        os.kill(process.pid, signal.SIGINT)
        process.stdin.close()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_a_start_is_told_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELITE_PRT", "9000")
    answer = run("serve", "no-such-model")
    assert answer.returncode == ExitCode.MODEL
    warning, error = answer.stderr.splitlines()
    assert "SERVELITE_PRT" in warning and "no effect" in warning
    assert "no-such-model" in error
    for words in (("",), ("demo", "--host", ""), ("demo", "--served-model-name", "")):
        answer = run("serve", *words)
        assert answer.returncode == ExitCode.SETTING
        (error,) = answer.stderr.splitlines()
        assert error.startswith("servelite: ") and "is empty" in error
