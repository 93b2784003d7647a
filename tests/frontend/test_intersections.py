"""Expressions that hold for one string at once are counted, wherever they stand, and bounded."""

from __future__ import annotations

from typing import Any

import pytest

from servelite.frontend.errors import APIError
from servelite.frontend.grammars import GrammarCheck
from servelite.frontend.intersections import MAX_EXPRESSIONS, most_expressions
from servelite.tokenizer.grammar import GrammarKind, grammar_text
from tests.engine.test_grammars import Bytes

PATTERNS = [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)]
CHAIN = {f"d{i}": {"pattern": f"a.{{{i}}}b", "$ref": f"#/$defs/d{i + 1}"} for i in range(28)} | {"d28": {}}


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        ({"type": "string", "pattern": "a"}, 0),  # joined to nothing
        ({"type": "string", "allOf": PATTERNS}, 29),
        ({"pattern": "x", "allOf": [{"allOf": PATTERNS[:3]}, {"format": "date"}]}, 5),
        ({"$defs": CHAIN, "$ref": "#/$defs/d0"}, 28),
        ({"allOf": [{"anyOf": [{"pattern": "a"}, {"allOf": PATTERNS[:4]}]}, {"oneOf": PATTERNS}]}, 5),
        ({"allOf": [{"properties": {"a": one}} for one in PATTERNS]}, 29),
        ({"allOf": [{"properties": {f"p{i}": one for i, one in enumerate(PATTERNS)}}, {}]}, 0),
        ({"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}, 0),
    ],
)
def test_the_count(schema: dict[str, Any], count: int) -> None:
    assert most_expressions(schema) == count


@pytest.mark.parametrize(
    "grammar",
    [
        grammar_text(GrammarKind.JSON_SCHEMA, {"type": "string", "allOf": PATTERNS}),
        grammar_text(GrammarKind.JSON_SCHEMA, {"$defs": CHAIN, "$ref": "#/$defs/d0"}),
        grammar_text(
            GrammarKind.LARK, "start: T\nT: " + " & ".join(f"/(?s:.*){one['pattern']}/" for one in PATTERNS)
        ),
    ],
)
def test_what_would_take_minutes_to_compile_is_refused_at_once(grammar: str) -> None:
    check = GrammarCheck(Bytes())  # type: ignore[arg-type]
    with pytest.raises(APIError) as caught:
        check.check(grammar, "f")
    assert str(MAX_EXPRESSIONS) in caught.value.message and caught.value.status == 400
