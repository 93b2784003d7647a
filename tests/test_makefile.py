"""What `make` installs on which machine, with a stand-in for Python."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.sources import ROOT

MAKE = shutil.which("make") or "make"
EDITABLE = "--config-settings editable_mode=compat -e"
INDEX = "https://index.invalid/cpu"
# Fails to install the CPU build from the configured index, where told so; notes what it was asked.
STAND_IN = """#!/bin/sh
echo "$@" >> asked
case "$*" in *extra-index-url*) exit 0;; *+cpu) [ ! -e index-has-no-cpu-build ];; esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone whose virtual environment is a stand-in, and a folder `bin` with just what make needs."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "touch", "cat"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return tmp_path


def make(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MAKE, *words],
        cwd=tree,
        env={"PATH": str(tree / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )


def asked(tree: Path) -> list[str]:
    """What pip was asked to install, one line a call, without the options every call has."""
    lines = (tree / "asked").read_text().splitlines()
    return [line.removeprefix("-m pip --disable-pip-version-check --quiet install ") for line in lines]


def install(tree: Path) -> list[str]:
    (tree / ".venv" / ".created").touch()
    result = make(tree, "install", f"TORCH_INDEX={INDEX}")
    assert result.returncode == 0, result.stderr
    return asked(tree)


def test_without_a_gpu_the_cpu_build_comes_first(tree: Path) -> None:
    assert install(tree) == ["torch==2.13.0+cpu", f"{EDITABLE} ."]


def test_where_the_index_has_none_pytorchs_own_is_asked(tree: Path) -> None:
    (tree / "index-has-no-cpu-build").touch()
    assert install(tree) == [
        "torch==2.13.0+cpu",
        f"--extra-index-url {INDEX} torch==2.13.0+cpu",
        f"{EDITABLE} .",
    ]


def test_with_a_gpu_the_cuda_build(tree: Path) -> None:
    (tree / "bin" / "nvidia-smi").symlink_to(shutil.which("true") or "true")
    assert install(tree) == ["torch==2.13.0", f"{EDITABLE} ."]


def test_the_second_time_asks_for_nothing(tree: Path) -> None:
    first = install(tree)
    assert make(tree, "install").returncode == 0
    assert asked(tree) == first


def test_the_tools_come_with_the_tests_only(tree: Path) -> None:
    install(tree)
    make(tree, ".venv/.dev")
    assert asked(tree)[-1] == f"{EDITABLE} .[dev]"
    make(tree, "install")
    assert asked(tree)[-1] == f"{EDITABLE} .[dev]", "installing twice what the tests installed already"


@pytest.mark.parametrize("python", ["no-such-python", "false"])
def test_an_unfit_python_is_one_line(tree: Path, python: str) -> None:
    (tree / "bin" / "false").symlink_to(shutil.which("false") or "false")
    result = make(tree, "install", f"PYTHON={python}")
    assert result.returncode != 0
    assert "servelite needs Python 3.11 or newer" in result.stderr
    assert not (tree / "asked").exists()


def test_help_names_every_target(tree: Path) -> None:
    (tree / "bin" / "awk").symlink_to(shutil.which("awk") or "awk")
    said = make(tree, "help").stdout
    for target in ("demo", "test", "test-all", "lint", "format", "install", "clean"):
        assert f"make {target} " in said


def test_the_demo_prints_the_readmes_curl_and_is_replaced_by_the_server(tree: Path) -> None:
    server = tree / ".venv" / "bin" / "servelite"
    server.write_text('#!/bin/sh\necho "$@" > served\n')
    server.chmod(0o755)
    (tree / ".venv" / ".created").touch()
    result = make(tree, "demo", "PORT=8123")
    assert result.returncode == 0, result.stderr
    assert (tree / "served").read_text() == "serve demo --host 127.0.0.1 --port 8123\n"
    curl = re.search(r"```\n(curl .*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert curl
    assert curl[1].replace(":8000", ":8123").split() == result.stdout.partition(":\n\n")[2].split()
