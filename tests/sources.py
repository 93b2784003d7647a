"""The repository's own files, for the tests that read code."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "servelite"


def python_files(*folders: str) -> list[Path]:
    """Every Python file below the given folders of the repository that exist, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tracked_files() -> list[Path]:
    """What is or would be committed; in a tree without git, what is there."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    paths = [ROOT / name for name in names if name] or [
        path for path in ROOT.rglob("*") if ".venv" not in path.parts
    ]
    return [path for path in paths if path.is_file()]
