"""The leftover check itself, in runs of pytest within pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = "from tests.conftest import *\nfrom tests import leftovers\nleftovers.GRACE_SECONDS = 0.3\n"

NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # none is used, and they take over a second to import


def run_inner(folder: Path, body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `body` as a test file under this project's conftest, in a process of its own."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_inner.py").write_text(body)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **NO_PLUGINS, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


MIXED = """
import os, pathlib, socket, subprocess, sys, tempfile
kept = []
def test_process():
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])
def test_orphan():
    subprocess.run(['sh', '-c', 'sleep 30 >/dev/null 2>&1 &'], check=True)
def test_segment():
    pathlib.Path(f'/dev/shm/servelite-test-{os.getppid()}').write_bytes(b'x')
def test_socket(tmp_path):
    kept.append(socket.socket(socket.AF_UNIX))
    kept[0].bind(str(tmp_path / 's'))
def test_folder():
    tempfile.mkdtemp()
def test_clean(tmp_path):
    with tempfile.TemporaryDirectory():
        subprocess.run(['true'], check=True)
    (tmp_path / 'kept').write_text('x')
    assert 'SERVELITE_PORT' not in os.environ
"""
LEFT = {
    "process": "left behind: process ",
    "orphan": "left behind: process ",
    "segment": "left behind: shared-memory segment servelite-test-",
    "socket": "left behind: socket ",
    "folder": "left behind: temporary file ",
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What an inner run of MIXED printed; it has a developer's setting in its environment."""
    try:
        result = run_inner(tmp_path_factory.mktemp("mixed"), MIXED, SERVELITE_PORT="1")
    finally:
        Path(f"/dev/shm/servelite-test-{os.getpid()}").unlink(missing_ok=True)
    assert result.returncode == 1, result.stdout
    return result.stdout


@pytest.mark.parametrize("kind", LEFT)
def test_what_a_test_leaves_fails_it(mixed: str, kind: str) -> None:
    section = mixed.split(f"ERROR at teardown of test_{kind} ")[1].split("ERROR at teardown")[0]
    assert LEFT[kind] in section


def test_what_is_put_away_and_a_clean_environment_pass(mixed: str) -> None:
    assert "6 passed, 5 errors" in mixed
    assert "ERROR at teardown of test_clean" not in mixed


def test_a_wider_fixtures_server_is_no_tests_leftover_but_the_runs(tmp_path: Path) -> None:
    body = (
        "import subprocess, pytest\n"
        "@pytest.fixture(scope='session')\n"
        "def server():\n"
        "    yield subprocess.Popen(['sleep', '30'])\n"
        "def test_it(server):\n"
        "    assert server.poll() is None\n"
    )
    result = run_inner(tmp_path, body)
    assert "1 passed" in result.stdout and "error" not in result.stdout
    assert result.returncode == 1
    assert "left behind by the whole run" in result.stdout and "sleep 30" in result.stdout
