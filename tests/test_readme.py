"""The README's promises: one command from a fresh clone, true answers, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT, tracked_files

ANSWER = "The capital of France is Paris."
READY_SECONDS = 600  # a virtual environment is made on the way


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(f"not ready; make's exit code so far: {process.poll()}")


def readme_block(start: str, language: str = "") -> str:
    """The README's first code block that begins with `start`."""
    blocks = re.findall(
        rf"^```{language}\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return next(block for block in blocks if block.startswith(start))


def said_by(*command: str) -> str:
    """What a command prints; it must succeed."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd="/").stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("clone")
    for path in tracked_files():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(READY_SECONDS + 120)
def test_make_demo_from_a_fresh_clone(clone: Path, demo_model: Path, tmp_path: Path) -> None:
    """A second start, in the environment that is there already, is quick."""
    # Under a virtual environment python3 is that environment's; the clone makes its own.
    python = f"PYTHON={sys.executable}"
    seconds = []
    for _ in range(2):
        port = free_port()
        start = time.monotonic()
        with open(tmp_path / "log", "wb") as log:
            # A session of its own: the signal below reaches make and all its children, as Ctrl-C does.
            process = subprocess.Popen(
                ["make", "demo", f"PORT={port}", python],
                cwd=clone,
                env={**os.environ, "HOME": str(tmp_path), "SERVELITE_CACHE": str(demo_model.parents[1])},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_ready(f"http://127.0.0.1:{port}", process)
            seconds.append(time.monotonic() - start)
            curl = readme_block("curl ").replace(":8000", f":{port}")
            answer = json.loads(said_by("bash", "-c", curl))
            assert answer["choices"][0]["message"]["content"] == ANSWER
            sdk = readme_block("from openai", "python").replace(":8000", f":{port}")
            assert said_by(sys.executable, "-c", sdk) == f"{ANSWER}\n"
        finally:
            print((tmp_path / "log").read_text())
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=60)
        assert "Traceback" not in (tmp_path / "log").read_text()
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    assert seconds[1] < 30


@pytest.mark.real_model
def test_the_readmes_program_without_a_server(demo_model: Path) -> None:
    program = readme_block("from servelite import LLM", "python")
    assert said_by(sys.executable, "-c", program) == f"{ANSWER}\n"
