"""docs/conformance.md lists the cases that are here, each where it is."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
CASE = re.compile(r"\b[A-Z]{3}-0\d\b")


def test_the_docs_table_is_what_the_tests_have() -> None:
    page = (HERE.parents[1] / "docs" / "conformance.md").read_text()
    rows = re.findall(r"^\| ([A-Z]{3}-0\d) \| .* \| `tests/conformance/(\w+\.py)` \|$", page, re.MULTILINE)
    assert len(rows) == len(dict(rows)) == 40
    here = {(case, path.name) for path in HERE.glob("test_*.py") for case in CASE.findall(path.read_text())}
    assert set(rows) <= here
    assert {case for case, _ in here} == set(dict(rows))
