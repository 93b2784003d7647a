"""The folder of the engine's sockets: fresh for each start, private, removed at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servelite.ipc.process import ExitCode
from servelite.ipc.sockets import engine_address
from servelite.launcher.errors import LaunchError


@contextmanager
def runtime_folder(parent: str) -> Iterator[str]:
    """A new folder of mode 0700 under `parent` (made if need be; empty: the temporary folder).

    A folder of its own even under a given parent, so that two servers can share one.

    Raises:
        LaunchError: it cannot be made, or its path is too long for a Unix socket.
    """
    made_parent = bool(parent) and not os.path.isdir(parent)
    try:
        if parent:
            os.makedirs(parent, mode=0o700, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="servelite-", dir=parent or None)
    except OSError as error:
        raise LaunchError(f"--runtime-dir {parent}: {error.strerror}", ExitCode.SETTING) from None
    try:
        try:
            engine_address(folder, 0, 0)
        except ValueError as error:
            raise LaunchError(str(error), ExitCode.SETTING) from None
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made_parent and not any(Path(parent).iterdir()):
            os.rmdir(parent)
