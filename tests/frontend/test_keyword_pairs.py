"""Keywords of JSON Schema together: what a grammar lets through is valid, whatever stands beside a keyword.

Each pair is tried in one subschema, in each place where a schema can stand. Small values that the keywords
speak of are offered to the grammar: none that it takes may be invalid.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from servelite.frontend.errors import APIError
from servelite.frontend.grammar_check import compile_check
from servelite.frontend.schema_keywords import ENFORCED
from servelite.tokenizer.grammar import GrammarError, Matcher
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from tests.engine.test_grammars import END, load

INTEGER, STRING = {"type": "integer"}, {"type": "string"}

FRAGMENTS: dict[str, list[Any]] = {
    "type": ["integer", "string", "object", "array", ["integer", "null"], ["string", "array"]],
    "enum": [[1, "a", None, {"b": [1]}, 2.5, [1, 2], "abc", {"a": 1}, {}], [1, 2, 6], [{"a": 1}, {"b": 2}]],
    "const": [3, "abc", {"a": 1}, [1, "x"], None],
    "multipleOf": [2, 0.5],
    "maximum": [7, 2.5],
    "exclusiveMaximum": [7, 3],
    "minimum": [3, -1],
    "exclusiveMinimum": [3, 0],
    "maxLength": [2, 3],
    "minLength": [1, 3],
    "pattern": ["^[ab]+$", "a"],
    "format": ["date"],
    "items": [INTEGER, False, {"enum": [1, "a"]}],
    "prefixItems": [[INTEGER, STRING], [STRING], [{"const": 1}, INTEGER]],
    "additionalItems": [INTEGER, False],
    "maxItems": [0, 1, 2],
    "minItems": [1, 2],
    "properties": [{"a": INTEGER, "b": STRING}, {"a": {"const": 1}}, {"x": STRING}, {"a": False}],
    "patternProperties": [{"^x": INTEGER}, {"^[ab]": STRING}],
    "additionalProperties": [False, INTEGER, True],
    "propertyNames": [{"enum": ["a", "z", 1]}, {"pattern": "^x"}, {"type": "string"}, {"const": "b"}],
    "required": [["a"], ["a", "z"], ["x1"]],
    "maxProperties": [0, 1],
    "minProperties": [1, 2],
    "allOf": [[{"minimum": 4}], [{"maxLength": 1}], [{"required": ["b"]}], [{"items": {"minimum": 2}}]],
    "anyOf": [
        [{"minimum": 5}, {"maximum": 1}],
        [INTEGER, STRING],
        [{"required": ["a"]}, {"required": ["b"]}],
    ],
    "oneOf": [[INTEGER, STRING], [{"const": 1}, {"const": "a"}]],
    "$ref": ["#/$defs/number", "#/$defs/object", "#/$defs/text", "#/$defs/list", "#/$defs/few"],
}
DEFS = {
    "number": {"type": "integer", "minimum": 2},
    "object": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
    "text": {"type": "string", "minLength": 2},
    "list": {"type": "array", "items": INTEGER, "minItems": 1},
    "few": {"enum": [1, 6, "a", "abc", {"a": 1}]},
}
PLACES: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "root": (lambda part: part, "%s"),
    "$ref": (lambda part: {"$ref": "#/$defs/it", "$defs": {"it": part}}, "%s"),
    "$ref with a sibling": (
        lambda part: {"$ref": "#/$defs/it", "enum": [1, "a", {"a": 1}, [1]], "$defs": {"it": part}},
        "%s",
    ),
    "properties": (lambda part: {"type": "object", "properties": {"p": part}, "required": ["p"]}, '{"p":%s}'),
    "items": (lambda part: {"type": "array", "items": part}, "[%s]"),
    "anyOf": (lambda part: {"anyOf": [part, {"const": "zz"}]}, "%s"),
    "allOf": (lambda part: {"allOf": [part, {"minimum": 2}]}, "%s"),
    "additionalProperties": (lambda part: {"type": "object", "additionalProperties": part}, '{"q":%s}'),
}
VALUES: list[Any] = [
    *[0, 1, 2, 3, 4, 6, 7, -1, 2.5, 0.5, 3.0, None, True, False],
    *["", "a", "b", "ab", "abc", "zz", "2020-01-01", "aaaa"],
    *[
        {},
        {"a": 1},
        {"a": "x"},
        {"b": 2},
        {"b": "q"},
        {"a": 1, "b": "q"},
        {"a": 5, "b": 3},
        {"x": 1},
        {"x": "s"},
    ],
    *[{"x1": "s"}, {"x1": 4}, {"a": 1, "z": 2}, {"a": 1, "x": 2}, {"b": [1]}],
    *[[], [1], ["a"], [1, "x"], [1, 2], ["x", 1], ["x", "y"], [1, 2, 3], [1, 1, "s"]],
]
TEXTS = [json.dumps(value, separators=(",", ":")) for value in VALUES]
TEXTS += ['{"x":1,"x":"s"}', '{"q":1,"q":2}', '{"a":1,"a":2}', '{"\\u0061":"x"}', "1e0", "0.30e1", "-0"]


def schemas(rng: random.Random) -> Iterator[tuple[dict[str, Any], str]]:
    """Every pair of keywords in every place, their values drawn; and how a value stands there."""
    for names in itertools.combinations(FRAGMENTS, 2):
        for build, text in PLACES.values():
            part = {name: rng.choice(FRAGMENTS[name]) for name in rng.sample(names, 2)}
            schema = build(part)
            yield schema | {"$defs": DEFS | schema.get("$defs", {})}, text


def taken(matcher: Matcher, text: str) -> bool:
    """Whether a text is a whole answer."""
    try:
        matcher.copy().accept([*text.encode(), END])
    except GrammarError:
        return False
    return True


def breaches(tried: list[tuple[dict[str, Any], str]]) -> tuple[list[str], int]:
    """What a grammar takes and its schema does not; and how many schemas took some text, rightly."""
    wrong, served = [], 0
    for schema, place in tried:
        grammar = grammar_text(GrammarKind.JSON_SCHEMA, schema)
        try:
            grammar = compile_check(grammar, load(), "f")
        except APIError:
            continue
        matcher, validator = load().compile(grammar), jsonschema.Draft202012Validator(schema)
        texts = [text for text in (place % text for text in TEXTS) if taken(matcher, text)]
        served += bool(texts)
        wrong += [f"{schema}: {text}" for text in texts if not validator.is_valid(json.loads(text))]
    return wrong, served


def test_the_keywords_are_all_here() -> None:
    assert {*FRAGMENTS, "$defs", "definitions", "$id", "$anchor", "discriminator"} == set(ENFORCED)


def test_some_pairs() -> None:
    rng = random.Random(1)
    wrong, served = breaches(rng.sample(list(schemas(rng)), 100))
    assert not wrong and served > 50


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_pair_in_every_place() -> None:
    tried = list(schemas(random.Random(4)))
    wrong, served = breaches(tried)
    assert not wrong and served > len(tried) * 0.6


def test_a_keyword_that_is_ignored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the table the compiler itself passes over these."""
    tuples = {"prefixItems": [INTEGER], "additionalItems": False}
    tried: list[tuple[dict[str, Any], str]] = [(tuples, "%s"), ({"minProperties": 2}, "%s")]
    assert breaches(tried) == ([], 0)
    monkeypatch.setattr("servelite.frontend.grammar_check.enforceable", lambda schema, place, **_: schema)
    assert len(breaches(tried)[0]) > 2
