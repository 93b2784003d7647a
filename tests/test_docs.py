"""The docs say what is: tables, files, names and commands. `test_architecture.py` follows the links."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from docs.write_tables import pages
from tests.sources import PACKAGE, ROOT, python_files
from tests.test_architecture import symbols

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("name", pages())
def test_a_page_made_from_declarations_is_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == pages()[name], "say `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_that_pages_name_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", page.read_text()))
    assert named <= targets


def code_words(page: Path) -> list[str]:
    """What stands between single backticks, code blocks apart."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def all_names() -> set[str]:
    names = set().union(*(symbols(path) for path in python_files("servelite", "tests")))
    return names | {name.rpartition(".")[2] for name in names}


PATH = re.compile(
    r"^(?!/)(?:[\w.-]+/)+[\w.-]*$|^[\w-]+\.(?:py|md|toml|txt|cpp)$|^Makefile$|^NOTICE$|^LICENSE$"
)
SYMBOL = re.compile(r"^(?P<path>[\w./-]+\.py)?:?(?P<name>[A-Za-z_][A-Za-z_.]*)(?:\(\))?$")
# Files, types and values that are not ours.
ELSEWHERE = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "vocab.txt",
    "application/json",
    "True",
    "False",
    "None",
}


def wrong_word(word: str, page: Path, names: set[str]) -> str | None:
    """Why a word in backticks names nothing of this repository, or None where it does or names no code."""
    if word in ELSEWHERE or "<" in word or "*" in word:
        return None
    if PATH.match(word):
        places = (ROOT / word, PACKAGE / word, page.parent / word)
        return None if any(place.exists() for place in places) else f"no such file: {word}"
    match = SYMBOL.match(word)
    if match and match["path"]:
        places = [base / match["path"] for base in (ROOT, PACKAGE) if (base / match["path"]).is_file()]
        known = symbols(places[0]) if places else set()
        return None if match["name"] in known else f"no such symbol: {word}"
    # A bare word is held to be a symbol where it is written as one: CamelCase, Class.method, or a call.
    bare = word.removesuffix("()")
    is_symbol = re.fullmatch(r"[A-Z][a-z]\w*(?:\.\w+)?", bare) or (
        word.endswith("()") and bare.isidentifier()
    )
    return f"no such symbol: {word}" if is_symbol and bare not in names else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_symbols_that_pages_name_exist(page: Path) -> None:
    names = all_names()
    found = {wrong_word(word, page, names) for word in code_words(page)} - {None}
    assert found == set()


@pytest.mark.parametrize(
    ("word", "wrong"),
    [
        ("servelite/config.py", False),
        ("ipc/messages.py", False),
        ("ipc/massages.py", True),
        ("config.py:Settings", False),
        ("config.py:Settings.to_dict", False),
        ("config.py:Sittings", True),
        ("Settings", False),
        ("Sittings", True),
        ("Settings.from_dict", False),
        ("Settings.from_nothing", True),
        ("flag_table()", False),
        ("flag_tables()", True),
        ("/v1/models", False),
        ("make demo", False),
        ("--port 0", False),
    ],
)
def test_what_names_nothing_is_found(word: str, wrong: bool) -> None:
    assert (wrong_word(word, ROOT / "README.md", all_names()) is not None) == wrong


def test_python_in_pages_compiles() -> None:
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            ast.parse(block, filename=str(page))
