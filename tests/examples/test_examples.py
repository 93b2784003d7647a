"""Every file of `examples/`, run as its reader would run it, against one real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.docker.nginx import running_nginx
from tests.http.server import Server, running_server
from tests.node.runtime import FOLDER as NODE_FOLDER
from tests.node.runtime import installed_node, run
from tests.sources import ROOT

EXAMPLES: Final = ROOT / "examples"
ANSWER: Final = "The capital of France is Paris."
PYTHON: Final = ("chat.py", "streaming.py", "tools.py", "concurrent_requests.py", "offline_batch.py")
NODE: Final = ("chat.mjs", "streaming.mjs")

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    flags = ("--max-model-len", "1024", "--kv-cache-memory-bytes", str(256 << 20))
    with running_server(tmp_path_factory.mktemp("server"), *flags) as made:
        yield made


def said_by(program: str, url: str, *command: str) -> list[str]:
    """The lines that an example prints; it must succeed."""
    done = subprocess.run(
        [*command, str(EXAMPLES / program)],
        env={**os.environ, "SERVELITE_URL": url, "PYTHONPATH": str(ROOT)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_is_here() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert files == {*PYTHON, *NODE, "curl.sh", "README.md"}
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"({name})" in page for name in files - {"README.md"})


def test_offline_batch(demo_model: Path) -> None:
    """Before the server is there: an engine of its own, with weights of its own."""
    rows = [json.loads(line) for line in said_by("offline_batch.py", "", sys.executable)]
    assert rows[0]["prompt"] == "The capital of France is"
    assert "Paris" in rows[0]["text"] and len(rows) == 3
    assert all(row["finish_reason"] in ("stop", "length") for row in rows)


def test_chat(server: Server) -> None:
    first, second, usage = said_by("chat.py", server.url, sys.executable)
    assert first == ANSWER and "Berlin" in second
    assert usage.endswith(" out")


def test_streaming(server: Server) -> None:
    assert said_by("streaming.py", server.url, sys.executable) == [ANSWER, "8 tokens"]


def test_tools(server: Server) -> None:
    call, answer = said_by("tools.py", server.url, sys.executable)
    assert call == 'get_temperature({"city": "Paris"}): 18 degrees'
    assert "18 degrees" in answer


def test_concurrent_requests(server: Server) -> None:
    lines = said_by("concurrent_requests.py", server.url, sys.executable)
    assert [line.partition(": ")[0] for line in lines] == ["France", "Germany", "Japan"]
    assert "Paris" in lines[0] and all(len(line) > 10 for line in lines)


def test_curl(server: Server) -> None:
    lines = said_by("curl.sh", server.url, "sh")
    assert json.loads(lines[0]) == {"status": "ready"}
    assert json.loads(lines[1])["choices"][0]["message"]["content"] == ANSWER
    events = [line for line in lines[2:] if line]
    assert events[-1] == "data: [DONE]" and "Paris" in "".join(events)


@pytest.mark.parametrize("program", NODE)
def test_node(server: Server, program: str, tmp_path: Path) -> None:
    """In a folder of its own, where the SDK is installed."""
    node = installed_node()
    (tmp_path / "node_modules").symlink_to(NODE_FOLDER / "node_modules")
    shutil.copy(EXAMPLES / program, tmp_path)
    done = run([node, program], tmp_path, SERVELITE_URL=server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == ANSWER


def test_behind_nginx(server: Server) -> None:
    """Both replicas of the configuration are the one server: an example cannot tell the difference."""
    with running_nginx((server.port, server.port)) as nginx:
        assert said_by("streaming.py", nginx.url, sys.executable) == [ANSWER, "8 tokens"]
