"""Log lines of a process: one format, to standard error."""

from __future__ import annotations

import logging
import sys


def configure_logs(level: str, process: str) -> None:
    """Called once at a process's start. `level` is a `--log-level`, `process` names who speaks."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, root.level))  # its start is our news
