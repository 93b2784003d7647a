"""`servelite env`: what a bug report needs to know of this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import servelite
from servelite.ipc.process import usable_cpus

_PACKAGES: Final = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "fastapi", "starlette", "uvicorn",
    "uvloop", "httptools", "pyzmq", "msgspec", "prometheus-client", "jinja2", "triton", "flash-attn",
)  # fmt: skip
_CPU_FLAGS: Final = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni",
    "amx_tile", "amx_bf16", "amx_int8", "asimddp", "bf16", "sve",
)  # fmt: skip


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser("env", help="versions and hardware, for a bug report", description=__doc__)
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print the report."""
    for name, value in report():
        print(f"{name}: {value}")
    return 0


def report() -> list[tuple[str, str]]:
    """Names and values, in the order they are printed."""
    cpu = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", cpu, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", cpu, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    name = model[1] if model else platform.machine()
    lines = [
        ("servelite", servelite.__version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("cpu", f"{name}, {os.cpu_count()} CPUs, {usable_cpus()} usable"),
        ("cpu flags", " ".join(f for f in _CPU_FLAGS if f in present) or "none that matter"),
        ("memory", _memory()),
        ("cgroup cpu.max", _read("/sys/fs/cgroup/cpu.max").strip() or "not set"),
        ("cgroup memory.max", _read("/sys/fs/cgroup/memory.max").strip() or "not set"),
        ("gpu", _gpu()),
    ]
    lines += [(name, _version(name)) for name in _PACKAGES]
    lines += [(k, v) for k, v in sorted(os.environ.items()) if k.startswith(("SERVELITE_", "OMP_", "GOMP_"))]
    return lines


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _memory() -> str:
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE))
    total, available = int(found.get("MemTotal", 0)), int(found.get("MemAvailable", 0))
    return f"{total / 2**20:.1f} GiB, {available / 2**20:.1f} GiB available"


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none (no nvidia-smi)"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    return "; ".join(answer.stdout.split("\n")).strip("; ")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
