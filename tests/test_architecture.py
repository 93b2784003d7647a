"""Every file and symbol that docs/architecture.md names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
NAME = re.compile(r"`([\w./-]+/[\w./-]+\.\w+)(?::([\w.]+))?`")


def symbols(path: Path) -> set[str]:
    """Names a module defines: functions, classes, constants, and Class.member."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(prefix + name)
                case ast.ClassDef(name=name):
                    found.add(prefix + name)
                    visit(node.body, f"{prefix}{name}.")
                case ast.Assign(targets=targets):
                    found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(prefix + name)

    visit(ast.parse(path.read_text()).body, "")
    return found


def broken(text: str) -> list[str]:
    """Names in `text` that resolve to nothing."""
    wrong = []
    for path, symbol in NAME.findall(text):
        file = ROOT / path
        if not file.is_file() or (symbol and symbol not in symbols(file)):
            wrong.append(f"{path}:{symbol}" if symbol else path)
    return wrong


def test_every_path_and_symbol_resolves() -> None:
    text = PAGE.read_text()
    assert len(NAME.findall(text)) > 40
    assert broken(text) == []


def test_a_wrong_name_would_be_found() -> None:
    assert broken("`servelite/config.py:Settings` `servelite/config.py`") == []
    assert broken(
        "`servelite/config.py:Setings` `servelite/none.py` `servelite/engine/core.py:EngineCore.no`"
    ) == [
        "servelite/config.py:Setings",
        "servelite/none.py",
        "servelite/engine/core.py:EngineCore.no",
    ]


def test_links_between_the_docs_resolve() -> None:
    for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
