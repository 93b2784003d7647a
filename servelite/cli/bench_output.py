"""The JSON file that a benchmark writes: what was asked for, on what, and the figures."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import servelite
from servelite.config import SettingError
from servelite.ipc.process import usable_cpus


def check_json_path(path: str | None) -> None:
    """Raises `SettingError` where the file could not be written: before an hour's run, not after it."""
    if path is None:
        return
    file = Path(path)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise SettingError(f"--json {path} is no file in a folder that exists")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise SettingError(f"--json {path} may not be written")


def write_json(
    path: str | None, kind: str, asked: dict[str, Any], whole: bool, results: Sequence[dict[str, Any]]
) -> None:
    """Write `results`, one object a row of the benchmark's table, to `path`; None: nothing is asked for.

    Raises:
        SettingError: it cannot be written.
    """
    if path is None:
        return
    content = {
        "benchmark": kind,
        "version": servelite.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"platform": platform.platform(), "usable_cpus": usable_cpus()},
        "asked": asked,
        "interrupted": not whole,
        "results": list(results),
    }
    try:
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise SettingError(f"--json {path} cannot be written: {error.strerror}") from None
