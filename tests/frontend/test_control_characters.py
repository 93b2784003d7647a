"""What patterns ask of control characters is followed, as far as strings of an answer have them."""

from __future__ import annotations

import json
import time

import pytest

from servelite.frontend.control_characters import narrowed
from servelite.frontend.grammars import compile_check
from servelite.frontend.schema_keywords import enforceable
from servelite.tokenizer.grammar import GrammarError, GrammarKind, grammar_text
from tests.engine.test_grammars import END, load


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^[\x00-\x1f]$", "\n", '"\\'),
        (r"^[[:cntrl:]]$", "\t", '"\\a'),
        (r"^[\x00-\x22]$", '"!', "\\"),
        ('^[^"]$', "a\\\n", '"'),
        (r'^[^"\\\]]$', "a\n", '"\\]'),
        (r"^\P{P}$", "a\r", '"\\'),
        (r"^[^\p{L}\x{62}]$", '"\\\b', "a"),
        ("^[^a]$", '"\\\b', "a"),
    ],
)
def test_a_list_with_control_characters_has_no_quote_that_is_not_in_it(
    pattern: str, right: str, wrong: str
) -> None:
    grammar = compile_check(
        grammar_text(GrammarKind.JSON_SCHEMA, {"type": "string"} | {"pattern": pattern}), load(), "f"
    )
    for text in right:
        load().compile(grammar).accept([*json.dumps(text).encode(), END])
    for text in wrong:
        with pytest.raises(GrammarError):
            load().compile(grammar).accept([*json.dumps(text).encode(), END])


def test_keys_may_have_control_characters_and_endless_lists_are_read_in_time() -> None:
    free = {"properties": {"\x01": {"type": "integer"}}, "required": ["\x01"], "const": {"\x01": 1}}
    assert enforceable(free, "f") == free
    began = time.thread_time()
    for text in ("[" * 250_000, "[[a" * 80_000):
        narrowed(text)
    assert time.thread_time() - began < 5
