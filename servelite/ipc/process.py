"""What a child process does first, and the environment it is started with."""

from __future__ import annotations

import ctypes
import enum
import math
import os
import signal
import sysconfig
from pathlib import Path
from typing import Final

import servelite

_PR_SET_PDEATHSIG: Final = 1
GOMP_SPINCOUNT: Final = 5000
"""OpenMP's spin before it sleeps: with the default, two busy neighbours cost a 2-thread engine 95 %."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies.

    A parent that has died before this call is not noticed; its end of the lifeline is closed by then.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def set_title(title: str) -> None:
    """What `ps` shows for this process: written over its arguments, as far as there is room.

    Source: proc(5), /proc/PID/stat, arg_start and arg_end. Nothing happens where these are not told.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    if start and room > 1:
        ctypes.memmove(start, title.encode()[: room - 1].ljust(room, b"\0"), room)


def usable_cpus() -> int:
    """CPUs this process may use: affinity, and the cgroup's quota (v2 and v1), rounded up."""
    count = len(os.sched_getaffinity(0))
    quota = _cgroup_cpu_quota()
    return max(1, min(count, math.ceil(quota))) if quota else count


def _cgroup_cpu_quota() -> float | None:
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return limit_us / period_us if limit_us > 0 else None
    except (OSError, ValueError):
        return None


def child_environment(share: int = 1) -> dict[str, str]:
    """Environment of a child: this process's, with the thread pools sized unless the user did.

    The working folder is not on the path of a child started with `-P`: it may hold anything. A servelite that
    is not installed is found where this process found it.

    `share`: how many children compute at once, so that each has its part of the CPUs.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // share)))
    environment.setdefault("GOMP_SPINCOUNT", str(GOMP_SPINCOUNT))
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    root = str(Path(servelite.__file__).parent.parent)
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root + (os.pathsep + inherited if inherited else "")
    return environment


class ExitCode(enum.IntEnum):
    """How a process of ours ends, by class of failure; the launcher ends with its child's."""

    OK = 0
    INTERNAL = 1  # a bug of ours
    SETTING = 2  # a flag or variable, or a port in use
    MODEL = 3  # no such model, damaged or unsupported files
    MEMORY = 4
    CHILD_DIED = 5  # a child ended without a word: killed from outside, or a crash in native code
