"""The tests in two runs side by side: `python -m tests.two_runs ARGUMENTS-OF-PYTEST`.

Most tests keep one core busy, or wait. Those that start no server with real weights, and hold little against
the clock, run beside the others at a lower priority, so that they hardly hold these up. Their output comes at
the end.
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
)
SERVED = ("models/test_real_ranks.py",)  # of these folders, but with servers that have real weights
NO_TESTS = 5  # pytest's exit code


def groups(root: Path) -> tuple[list[str], list[str]]:
    """What the first and the second run are told to run, of the tests in a folder."""
    served = [str(path) for name in SERVED if (path := root / name).exists()]
    beside = [str(path) for name in BESIDE if (path := root / name).is_dir()]
    first = [
        str(path)
        for path in sorted(root.iterdir())
        if path.name not in BESIDE and (path.match("test_*.py") or (path.is_dir() and path.name[0] != "_"))
    ]
    return first + served, beside + [f"--ignore={path}" for path in served]


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
