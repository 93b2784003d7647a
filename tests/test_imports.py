"""Imports run one way, and what must start light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sources import PACKAGE, ROOT, python_files

# A part may import those of a later line, never one of its own line or an earlier one.
ORDER = (
    ("__main__",),
    ("cli",),
    ("bench", "llm"),
    ("launcher",),
    ("frontend", "engine"),
    ("executor",),
    ("worker",),
    ("loader",),
    ("models",),
    ("layers",),
    ("kernels",),
)
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
# Anyone may use the leaves; each may use only these.
LEAVES = {
    "config": set(),
    "platform_check": set(),
    "ipc": {"config"},
    "tokenizer": {"config"},
    "observability": {"config", "ipc"},
}
# Third parties by part: those it never imports, and those it may import only inside a function.
NEVER = {
    "engine": {
        "fastapi",
        "starlette",
        "uvicorn",
        "httptools",
        "transformers",
        "torch",
        "jinja2",
        "tokenizers",
    },
    "ipc": {"torch", "transformers", "fastapi", "starlette", "uvicorn", "pickle"},
    "tokenizer": {"torch"},
    "observability": {"torch", "transformers"},
    "config": {"torch", "transformers", "numpy"},
}
LAZY = {
    "cli": {"torch", "transformers"},
    "bench": {"torch", "transformers"},
    "llm": {"torch", "transformers"},
    "launcher": {"torch", "transformers"},
    "frontend": {"torch", "transformers"},
    "tokenizer": {"transformers"},
    "models": {"transformers"},
    "worker": {"transformers"},
    "loader": {"transformers"},
}


@dataclass(frozen=True)
class Import:
    """One import: of which module, on which line, and whether only when a function runs."""

    module: str
    line: int
    lazy: bool


def imports_of(source: str, module: str) -> list[Import]:
    """Every import in the text of `module`, relative ones made absolute.

    `from servelite.a import b` counts as `servelite.a.b`, which a sub-module b would be.
    """
    package = module.split(".")[:-1]
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found.extend(Import(f"{prefix}.{alias.name}", node.lineno, lazy) for alias in node.names)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        inside = inside or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), lazy=False)
    return found


def part_of(module: str) -> str:
    """The part of the package that `module` belongs to; "" for the package itself."""
    name = module.split(".")[1:2]
    return name[0] if name and name[0] != "__init__" else ""


def allowed(importer: str, imported: str) -> bool:
    """Whether part `importer` may import part `imported`."""
    if importer == imported or not imported:
        return True
    if importer in LEAVES:
        return imported in LEAVES[importer]
    return imported in LEAVES or RANK[importer] < RANK[imported]


def complaints(source: str, module: str) -> list[str]:
    """What is wrong with the imports in the text of `module`, one line each."""
    importer = part_of(module)
    wrong = []
    for found in imports_of(source, module):
        top = found.module.split(".")[0]
        where = f"{module}:{found.line} imports {found.module}"
        if top == "servelite":
            imported = part_of(found.module)
            known = imported in RANK or imported in LEAVES
            if known and importer and not allowed(importer, imported):
                wrong.append(f"{where}: {importer} may not import {imported}")
            if not importer and known and not found.lazy:
                wrong.append(f"{where}: the package itself imports nothing at once")
        elif top in NEVER.get(importer, ()):
            wrong.append(f"{where}: {importer} never imports {top}")
        elif top in LAZY.get(importer, ()) and not found.lazy:
            wrong.append(f"{where}: {importer} imports {top} only inside a function")
    return wrong


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", python_files("servelite"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    assert complaints(path.read_text(), module_name(path)) == []


def test_every_part_has_its_place() -> None:
    parts = {
        entry.stem
        for entry in PACKAGE.iterdir()
        if entry.suffix == ".py" or (entry / "__init__.py").is_file()
    }
    assert parts - {"__init__"} <= {*RANK, *LEAVES}


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("servelite.engine.core", "import servelite.frontend.app", "engine may not import frontend"),
        ("servelite.frontend.app", "from servelite import engine", "frontend may not import engine"),
        ("servelite.frontend.app", "from ..engine import core", "frontend may not import engine"),
        ("servelite.models.llama", "from servelite.loader import resolve", "models may not import loader"),
        ("servelite.executor.base", "def f():\n  import servelite.engine", "executor may not import engine"),
        ("servelite.ipc.sockets", "from servelite.tokenizer import gguf", "ipc may not import tokenizer"),
        ("servelite.config", "from servelite.ipc import messages", "config may not import ipc"),
        ("servelite.llm", "import servelite.cli", "llm may not import cli"),
        ("servelite.engine.core", "def f():\n  import transformers", "engine never imports transformers"),
        ("servelite.tokenizer.gguf", "import torch.nn", "tokenizer never imports torch"),
        ("servelite.frontend.app", "from torch import nn", "frontend imports torch only inside a function"),
        ("servelite.__init__", "import servelite.llm", "the package itself imports nothing at once"),
        ("servelite.cli", "import torch", "cli imports torch only inside a function"),
    ],
)
def test_a_planted_import_is_found(module: str, text: str, complaint: str) -> None:
    assert any(complaint in line for line in complaints(text, module))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "servelite.engine.core",
            "from servelite.executor import base\nfrom servelite.ipc import messages\nimport msgspec",
        ),
        ("servelite.frontend.app", "def f():\n  import torch"),
        ("servelite.frontend.app", "import typing\nif typing.TYPE_CHECKING:\n  import transformers"),
        ("servelite.cli.chat", "from servelite import llm\nfrom servelite.kernels import dispatch"),
        ("servelite.ipc.sockets", "from . import messages\nfrom servelite.config import Settings"),
        ("servelite.__init__", "def __getattr__(name):\n  from servelite.llm import LLM"),
    ],
)
def test_a_right_import_is_not_complained_of(module: str, text: str) -> None:
    assert complaints(text, module) == []


def start_of(modules: list[str]) -> set[str]:
    """The top-level packages that a fresh Python holds after importing `modules`."""
    script = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    script += "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-c", script, *modules], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def modules_of(*parts: str) -> list[str]:
    """All modules of the given parts, but for those that run on import."""
    paths = python_files(*(f"servelite/{part}" for part in parts))
    paths += [PACKAGE / f"{part}.py" for part in parts if (PACKAGE / f"{part}.py").is_file()]
    return [module_name(path) for path in paths if path.stem != "__main__"]


def test_what_starts_light_stays_light() -> None:
    light = modules_of(
        "cli", "llm", "launcher", "frontend", "ipc", "tokenizer", "config", "observability", "loader/__init__"
    )
    light += [f"servelite.loader.{name}" for name in ("resolve", "demo")]
    assert start_of(light) & {"torch", "transformers"} == set()


def test_the_engine_and_the_models_load_no_web_framework_and_no_transformers() -> None:
    heavy = modules_of("engine", "executor", "worker", "loader", "models", "layers", "kernels")
    assert start_of(heavy) & {"fastapi", "starlette", "uvicorn", "transformers"} == set()


def test_the_package_alone_loads_nothing() -> None:
    assert start_of(["servelite"]) & {"numpy", "msgspec", "torch", "fastapi"} == set()
