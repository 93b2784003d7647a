"""The two runs have every test once, and fail where one of them does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plumbing.test_leftovers import NO_PLUGINS
from tests.two_runs import TESTS, groups

PROGRAM = """
import sys
from pathlib import Path
from tests.two_runs import main

sys.exit(main(sys.argv[1:-1], Path(sys.argv[-1])))
"""


def of(paths: list[str]) -> list[Path]:
    """The files of a run."""
    left_out = {Path(path.partition("=")[2]) for path in paths if path.startswith("--")}
    found: list[Path] = []
    for path in map(Path, paths):
        found += path.rglob("test_*.py") if path.is_dir() else [path] if path.is_file() else []
    return [path for path in found if path not in left_out and "node_modules" not in path.parts]


def test_every_file_is_in_one_of_them() -> None:
    first, second = map(of, groups(TESTS))
    there = [path for path in TESTS.rglob("test_*.py") if "node_modules" not in path.parts]
    assert sorted(first + second) == sorted(there) and len(second) > 50


@pytest.mark.parametrize(
    ("one", "other", "code"),
    [
        ("assert 1", "assert 1", 0),
        ("assert 1", "assert 0", 1),
        ("assert 0", "assert 1", 1),
        ("", "assert 1", 0),
        ("", "", 5),
    ],
)
def test_one_that_fails_fails_both(tmp_path: Path, one: str, other: str, code: int) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, line in (("http", one), ("engine", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(f"def test_{name}(): {line}\n" if line else "")
    arguments = ["-v", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini"), str(tmp_path)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    environment = os.environ | NO_PLUGINS
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=TESTS.parent, env=environment, check=False
    )
    assert done.returncode == code, done.stdout
    for name, line in (("http", one), ("engine", other)):
        assert f"test_{name} {'PASSED' if line == 'assert 1' else 'FAILED'}" in done.stdout or not line
