"""The thread that compiles grammars, with a stack for the deepest of them.

The library follows rules and references by recursion, natively: a chain of a thousand that a client sends
would overrun the usual 8 MiB, and end the process.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

STACK_BYTES: Final = 128 << 20
"""Twice what a grammar as large as they may be was seen to take; what is not used takes no memory."""


def compile_thread(name: str) -> ThreadPoolExecutor:
    """One thread, which has begun; all grammars of a process are compiled there."""
    pool = ThreadPoolExecutor(1, name)
    before = threading.stack_size(STACK_BYTES)
    try:
        pool.submit(int).result()  # a pool starts its thread with its first work
    finally:
        threading.stack_size(before)
    return pool
