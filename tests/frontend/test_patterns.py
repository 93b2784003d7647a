"""What patterns ask is followed as ECMA-262 and `re` have it, of what strings of an answer are written in."""

from __future__ import annotations

import json
import time

import pytest

from servelite.frontend.grammar_check import compile_check
from servelite.frontend.patterns import narrowed
from servelite.frontend.schema_keywords import enforceable
from servelite.tokenizer.grammar import GrammarError
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from tests.engine.test_grammars import END, load


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^[\x00-\x1f]$", "\n\b", '"\\'),
        (r"^[\x00-\x1fa]$", "a", '"\\'),
        (r'^[^"\n]$', "a\b", '"\n'),
        (r'^([^"\s]|\s)+$', "a\b\n", '"'),
        (r"^[\x00-\x22]$", '"!', "\\"),
        ('^[^"]$', "a\\\n", '"'),
        (r'^[^"\\\]]$', "a\n", '"\\]'),
        (r"^\P{P}$", "a\r", '"\\'),
        (r"^[^\p{L}\x{62}]$", '"\\\b', "a"),
        ("^[^a]$", '"\\\b', "a"),
        (r"^\d$", "3", "\u0663a"),
        (r"^[\D]$", "a", "\u06633"),
        (r"^\w$", "a_", "é-"),
        (r"^\W$", "-", "é_"),
        (r"^[^\w]$", "-", "é_"),
        (r"^[^\W]$", "a_", "é-"),
        (r"^\s$", " \xa0\n", "\x85\ufeffa"),
        (r"^[^\s]$", "aé", "\x85\ufeff "),
        (r"^[\S]$", "aé", "\x85\ufeff "),
        ("^.$", 'a"', "\n\r\u2028"),
        ("^(?s:.)$", "a\n", ""),
        (r"^[^<>()[\]\\.]$", "a{", "[]<"),
        (r"^[\w&&[\b]$", "a&[\b", "-\\"),
        ("^[a-c--b~~a]$", "abc-~", "d"),
    ],
)
def test_a_pattern_matches_what_is_in_it(pattern: str, right: str, wrong: str) -> None:
    grammar = compile_check(
        grammar_text(GrammarKind.JSON_SCHEMA, {"type": "string"} | {"pattern": pattern}), load(), "f"
    )
    for text in right:
        load().compile(grammar).accept([*json.dumps(text, ensure_ascii=False).encode(), END])
    for text in wrong:
        with pytest.raises(GrammarError):
            load().compile(grammar).accept([*json.dumps(text, ensure_ascii=False).encode(), END])


def test_keys_may_have_control_characters_and_endless_lists_are_read_in_time() -> None:
    free = {"properties": {"\x01": {"type": "integer"}}, "required": ["\x01"], "const": {"\x01": 1}}
    assert enforceable(free, "f") == free
    began = time.thread_time()
    for text in ("[" * 250_000, "[[a" * 80_000, "." * 250_000, "[[:" + "a" * 250_000):
        narrowed(text)
    assert time.thread_time() - began < 10  # 2 where nothing else runs


@pytest.mark.parametrize("pattern", ["^[[:alpha:]]+$", "[^a[:^digit:]]"])
def test_a_posix_class_is_refused(pattern: str) -> None:
    """ECMA-262 and `re` read a list of characters and a bracket."""
    with pytest.raises(ValueError, match="POSIX"):
        narrowed(pattern)
    assert narrowed("[:a]:") and narrowed("[a:]:]")
