"""The tests in two runs side by side: `python -m tests.two_runs ARGUMENTS-OF-PYTEST`.

Most tests keep one core busy, or wait. Those that start no server with real weights, and hold little against
the clock, run beside the others at a lower priority, so that they hardly hold these up. Their output comes at
the end. `BESIDE` has as many of them as make the two runs about equally long.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
BESIDE = (
    "engine",
    "frontend",
    "ipc",
    "kernels",
    "layers",
    "loader",
    "models",
    "plumbing",
    "tokenizer",
    "worker",
    "conformance/test_dead_engine.py",
    "http/test_openapi.py",
    "http/test_random_bodies.py",
    "http/test_soak.py",
    "test_packaging.py",
)
SERVED = ("models/test_real_ranks.py",)  # of these folders, but with servers that have real weights
NO_TESTS = 5  # pytest's exit code


def groups(root: Path) -> tuple[list[str], list[str]]:
    """What the first and the second run are told to run, of the tests in a folder."""
    served, beside = (
        [path for name in names if (path := root / name).exists()] for names in (SERVED, BESIDE)
    )
    first = [
        path
        for path in sorted(root.iterdir())
        if path not in beside and (path.match("test_*.py") or (path.is_dir() and path.name[0] != "_"))
    ]
    return _told(first + served, beside), _told(beside, served)


def _told(paths: list[Path], others: list[Path]) -> list[str]:
    """Arguments of a run of `paths`, but for those of the `others` that are in them."""
    return [*map(str, paths), *(f"--ignore={path}" for path in others if path.parent in paths)]


def main(arguments: list[str], root: Path = TESTS) -> int:
    """Run both; the exit code is that of one that failed, if any did."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    first, second = groups(root)
    with tempfile.TemporaryFile() as told:
        beside = subprocess.Popen(
            ["nice", *pytest, *second], stdin=subprocess.DEVNULL, stdout=told, stderr=subprocess.STDOUT
        )
        codes = [subprocess.run([*pytest, *first], check=False).returncode, beside.wait()]
        told.seek(0)
        sys.stdout.buffer.write(told.read())
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
