"""The folder of the engine's sockets: fresh for each start, private, removed at the end.

A lock in it is held as long as its launcher lives, so that the next start can remove what a launcher
that was killed has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from servelite.ipc.process import ExitCode
from servelite.ipc.sockets import engine_address
from servelite.launcher.errors import LaunchError

_PREFIX: Final = "servelite-"
_LOCK: Final = "servelite-owner.lock"


@contextmanager
def runtime_folder(parent: str) -> Iterator[str]:
    """A new folder of mode 0700 under `parent` (made if need be; empty: the temporary folder).

    A folder of its own even under a given parent, so that two servers can share one.

    Raises:
        LaunchError: it cannot be made, or its path is too long for a Unix socket.
    """
    with contextlib.ExitStack() as undo:
        try:
            if parent:
                _make_parents(Path(parent), undo)
            where = parent or tempfile.gettempdir()
            _sweep(where)
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=where)
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            undo.callback(os.close, _lock(folder))
        except OSError as error:
            raise LaunchError(
                f"--runtime-dir {parent}: {error.strerror}; give a folder that can be written to",
                ExitCode.SETTING,
            ) from None
        try:
            engine_address(folder, 0, 0)
        except ValueError as error:
            raise LaunchError(str(error), ExitCode.SETTING) from None
        yield folder


def _make_parents(folder: Path, undo: contextlib.ExitStack) -> None:
    """Make `folder` and those above it; those that were made and are empty at the end are removed then."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        undo.callback(_remove_if_empty, each)
    if not folder.is_dir():
        raise NotADirectoryError(0, "not a folder")


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _lock(folder: str) -> int:
    """The descriptor of the folder's lock, which is held from the moment its name is there."""
    unnamed = os.path.join(folder, "new")
    fd = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(unnamed, os.path.join(folder, _LOCK))
    return fd


def _sweep(parent: str) -> None:
    """Remove the folders under `parent` whose launchers are gone: nobody holds their lock."""
    for folder in Path(parent).glob(_PREFIX + "*"):
        try:
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # of another program or user, or being made this moment
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its launcher lives
        finally:
            os.close(fd)
