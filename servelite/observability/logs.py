"""Log lines of a process: one format, to standard error."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from typing import Final

REQUEST_ID: Final = ContextVar("request_id", default="")
"""Of the request that is worked on, where a front end works on one: it stands in the log's lines."""


def configure_logs(level: str, process: str) -> None:
    """Called once at a process's start. `level` is a `--log-level`, `process` names who speaks."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(request)s%(message)s")
    )
    handler.addFilter(_name_request)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, root.level))  # its start is our news


def _name_request(record: logging.LogRecord) -> bool:
    request_id = REQUEST_ID.get()
    record.request = f"[request {request_id}] " if request_id else ""
    return True
