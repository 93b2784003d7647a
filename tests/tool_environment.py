"""Python programs in environments of their own, on top of the tests' packages; kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import pytest

from servelite.loader.resolve import cache_folder


def python_with(*packages: str) -> Path:
    """The Python of an environment that has `packages` (pinned); made the first time, in a minute.

    What the tests' own environment has, torch and transformers above all, it shares: a newer or older
    version that a package asks for is installed beside it. The test is skipped where they cannot be had.
    """
    shared = sysconfig.get_path("purelib")
    key = hashlib.sha256("\n".join((sys.version, shared, *packages)).encode()).hexdigest()[:16]
    folder = cache_folder() / "tools" / f"{packages[0].replace('==', '-')}-{key}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix="part-", dir=folder.parent))
        try:
            _make(part, shared, packages)
            os.rename(part, folder)
        except OSError:
            if not folder.is_dir():  # another run was first otherwise, and its environment is as good
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder / "bin" / "python"


def _make(folder: Path, shared: str, packages: tuple[str, ...]) -> None:
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(shared + "\n")  # behind its own packages
    command = [python, "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        pytest.skip(f"{packages[0]} cannot be installed: {done.stderr.strip()[-300:]}")
