"""Node's clients against a server: `*.test.mjs`, run by Node's own test runner."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.http.scripted import KEY, scripted_server
from tests.http.server import running_server
from tests.node.runtime import FOLDER, installed_node, run


def test_the_lock_file_names_no_registry() -> None:
    text = (FOLDER / "package-lock.json").read_text()
    assert "resolved" not in text and "://" not in text
    assert re.search(r'"node_modules/openai": {\s+"version"', text)
    assert "omit-lockfile-registry-resolved=true" in (FOLDER / ".npmrc").read_text().splitlines()


@pytest.fixture(scope="module")
def node() -> Path:
    return installed_node()


@pytest.mark.real_model
@pytest.mark.timeout(400)
def test_the_node_sdk(node: Path, tmp_path: Path, demo_model: Path) -> None:
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    assert int(version[1:].split(".")[0]) >= 22
    flags = ("--max-model-len", "1024", "--kv-cache-memory-bytes", str(256 << 20))
    with running_server(tmp_path, *flags) as server:
        passed = _passed(node, "sdk.test.mjs", SERVELITE_URL=server.url)
        assert passed == (FOLDER / "sdk.test.mjs").read_text().count('\ntest("')
        server.idle_metrics()  # the stream that was left is aborted


def _passed(node: Path, file: str, **settings: str) -> int:
    """How many tests a file has, all of which pass."""
    done = run([node, "--test", "--test-reporter=tap", file], **settings)
    assert done.returncode == 0, done.stdout[-5000:]
    counts = dict(re.findall(r"^# (tests|pass) (\d+)$", done.stdout, re.MULTILINE))
    assert counts["tests"] == counts["pass"]
    return int(counts["pass"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_helpers_of_the_openai_and_the_ai_sdk(node: Path, tmp_path: Path, demo_model: Path) -> None:
    with scripted_server(tmp_path) as server:
        passed = _passed(node, "scripted.test.mjs", SERVELITE_URL=server.url, SERVELITE_KEY=KEY)
        assert passed == 7 + 4 * 4 + 1  # OpenAI's; the AI SDK's over each API, and its embeddings


def test_packages_are_what_the_lock_file_says(node: Path) -> None:
    lock = json.loads((FOLDER / "package-lock.json").read_text())["packages"]
    for name in json.loads((FOLDER / "package.json").read_text())["dependencies"]:
        installed = json.loads((FOLDER / "node_modules" / name / "package.json").read_text())
        assert installed["version"] == lock[f"node_modules/{name}"]["version"]
