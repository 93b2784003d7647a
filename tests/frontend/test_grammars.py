"""Every keyword of JSON Schema is enforced or refused; what is wrong with a grammar is a 400 that says so."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from servelite.frontend.errors import APIError
from servelite.frontend.grammar_check import compile_check
from servelite.frontend.grammars import read_response_format, read_structured_outputs
from servelite.frontend.protocol import read_chat
from servelite.frontend.repetitions import MAX_RUN
from servelite.frontend.schema_keywords import (
    ANNOTATIONS,
    DRAFTS,
    ENFORCED,
    MAX_DEPTH,
    MAX_JSON_DEPTH,
    MAX_NUMBER,
    MAX_PATTERN_PROPERTIES,
    MAX_PROPERTIES,
    MAX_SUBSCHEMAS,
    REFUSED,
    enforceable,
)
from servelite.ipc.masks import unpack_bits
from servelite.tokenizer.compile_thread import compile_thread
from servelite.tokenizer.grammar import GrammarError
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text, json_rule
from tests.engine.test_grammars import END, PIECES, load
from tests.frontend.field_cases import nested

INTEGER, STRING = {"type": "integer"}, {"type": "string"}

# Every keyword of the drafts 2020-12 and 7.
KEYWORDS = [
    *(
        "$schema",
        "$id",
        "$ref",
        "$anchor",
        "$dynamicRef",
        "$dynamicAnchor",
        "$vocabulary",
        "$comment",
        "$defs",
    ),
    *("definitions", "$recursiveRef", "$recursiveAnchor", "type", "enum", "const", "multipleOf", "maximum"),
    *("exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength", "minLength", "pattern", "maxItems"),
    *("minItems", "uniqueItems", "maxContains", "minContains", "maxProperties", "minProperties", "required"),
    *(
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
    ),
    *("else", "properties", "patternProperties", "additionalProperties", "propertyNames", "prefixItems"),
    *("items", "additionalItems", "contains", "unevaluatedItems", "unevaluatedProperties", "title"),
    *("description", "default", "deprecated", "readOnly", "writeOnly", "examples", "format"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
]

TAGGED: dict[str, Any] = {
    "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}],
    "$defs": {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name}, "x": kind},
            "additionalProperties": False,
        }
        for name, kind in (("a", INTEGER), ("b", {"type": "boolean"}))
    },
}
"""As pydantic writes it: the property that tells branches apart may be left out, as it has a default."""

SCHEMAS: dict[str, list[Any]] = {
    "type": [INTEGER, {"type": ["integer", "null"]}, {"type": "number"}, {"type": "boolean"}],
    "enum": [{"enum": [1, "a", None, {"b": [1]}, 1.5]}, {"enum": ["a", "bbb"], "minLength": 2}],
    "const": [{"const": {"a": [1, "x"]}}],
    "multipleOf": [{"type": "integer", "multipleOf": 7}, {"type": "number", "multipleOf": 0.25}],
    "maximum": [{"type": "number", "maximum": -2}],
    "exclusiveMaximum": [{"type": "integer", "exclusiveMaximum": 3}],
    "minimum": [{"type": "integer", "minimum": -12, "maximum": 130}, {"minimum": 5}],
    "exclusiveMinimum": [{"type": "number", "exclusiveMinimum": 3}],
    "maxLength": [STRING | {"maxLength": 3}],
    "minLength": [STRING | {"minLength": 3}, {"minLength": 2}],
    "pattern": [STRING | {"pattern": "^a[bc]+$", "maxLength": 6}, STRING | {"pattern": r"^\d\w\s$"}],
    "format": [STRING | {"format": "date"}, {"format": "date"}, {"format": "time", "pattern": "^1"}],
    "items": [{"type": "array", "items": INTEGER}, {"type": "array", "items": False}],
    "prefixItems": [{"type": "array", "prefixItems": [INTEGER, STRING], "items": {"type": "boolean"}}],
    "additionalItems": [
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [INTEGER],
            "additionalItems": STRING,
        }
    ],
    "maxItems": [{"type": "array", "items": INTEGER, "maxItems": 2}],
    "minItems": [{"type": "array", "items": INTEGER, "minItems": 2}],
    "properties": [{"type": "object", "properties": {"a": INTEGER, "b/c": STRING}}],
    "patternProperties": [
        {"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": False}
    ],
    "additionalProperties": [
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {"type": "boolean"}}
    ],
    "propertyNames": [
        {"propertyNames": {"$ref": "#/$defs/E"}, "additionalProperties": INTEGER, "type": "object"}
        | {"$defs": {"E": {"enum": ["a", "b"], "type": "string", "title": "E"}}, "properties": {"a": STRING}},
        {"type": "object", "propertyNames": {"const": "a"}},
        {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": INTEGER},
        {"type": "object", "propertyNames": {"pattern": "^[ab]{3}"}, "required": ["aba"]},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
    ],
    "required": [{"type": "object", "properties": {"a": INTEGER}, "required": ["a", "z"]}],
    "maxProperties": [{"type": "object", "maxProperties": 1}],
    "minProperties": [
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 1},
        {"type": "object", "additionalProperties": INTEGER, "required": ["a"], "minProperties": 2},
    ],
    "allOf": [{"allOf": [INTEGER, {"minimum": 4}]}],
    "anyOf": [{"anyOf": [{"minimum": 5}, {"maximum": 1}], "type": "integer"}],
    "oneOf": [{"oneOf": [INTEGER, STRING]}, TAGGED],
    "discriminator": [TAGGED | {"discriminator": {"propertyName": "kind", "mapping": {"b": "#/$defs/b"}}}],
    "$ref": [
        {"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": INTEGER}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    ],
    "$defs": [{"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}],
    "definitions": [{"$ref": "#/definitions/a", "definitions": {"a": INTEGER}}],
    "$id": [
        {"properties": {"a": {"$id": "#/properties/a", "$ref": "#/$defs/i"}}, "$defs": {"i": INTEGER}},
        {"$ref": "/z", "$id": "http://x/y", "$defs": {"a": {"$id": "/z", "type": "integer"}}},
    ],
    "$anchor": [{"$ref": "#foo", "$defs": {"a": {"$anchor": "foo", "type": "integer"}}}],
}
"""For each enforced keyword, schemas that it has a part in."""


def text_by(grammar: str, seed: int, most: int = 300) -> str | None:
    """A text of the grammar's by a blind writer, who likes to close what is open; None: none in time."""
    matcher, rng, text = load().compile(grammar), random.Random(seed), b""
    words = np.zeros(-(-len(PIECES) // 32), np.uint32)
    for length in range(most):
        matcher.fill(words)
        allowed = np.flatnonzero(unpack_bits(words.view(np.uint8)[None], len(PIECES))[0]).tolist()
        assert allowed, text
        if allowed == [END] or (END in allowed and (rng.random() < 0.5 or length > 100)):
            return text.decode()
        allowed = [token for token in allowed if token != END]
        plain = [token for token in allowed if PIECES[token] in _PLAIN] or allowed
        closing = [token for token in allowed if PIECES[token] in _CLOSING]
        token = rng.choice(closing if closing and length > 50 else plain if rng.random() < 0.8 else allowed)
        matcher.accept([token])
        text += PIECES[token]
    return None


_PLAIN = {bytes([byte]) for byte in b'"{}[],:0123456789abctruflsn@.-/'}
_CLOSING = {b'"', b"}", b"]"}


def place_of(schema: Any) -> str:
    with pytest.raises(APIError) as caught:
        enforceable(schema, "f")
    assert caught.value.status == 400 and caught.value.param == "f"
    return caught.value.message


def test_every_keyword_has_its_place_in_the_table() -> None:
    assert sorted([*KEYWORDS, "discriminator"]) == sorted([*ENFORCED, *ANNOTATIONS, *REFUSED])
    assert sorted(SCHEMAS) == sorted(ENFORCED)


@pytest.mark.parametrize("keyword", ENFORCED)
def test_an_enforced_keyword(keyword: str) -> None:
    """What the grammar lets through is valid; and the writer does find texts."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    for schema in SCHEMAS[keyword]:
        assert keyword in json.dumps(schema)
        grammar = compile_check(grammar_text(GrammarKind.JSON_SCHEMA, schema), load(), "f")
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        texts = [text for seed in range(12) if (text := text_by(grammar, seed)) is not None]
        assert texts
        for text in texts:
            validator.validate(json.loads(text))


@pytest.mark.parametrize("keyword", [*REFUSED, "minLenght", "nullable"])
def test_a_keyword_that_is_not_enforced_is_named_with_its_place(keyword: str) -> None:
    for schema, place in (
        ({keyword: True}, "f"),
        ({"properties": {"a": {"items": {keyword: {}}}}}, "f.properties.a.items"),
        ({"anyOf": [{}, {"additionalProperties": {keyword: 1}}]}, "f.anyOf[1].additionalProperties"),
        ({"$defs": {"d": {"prefixItems": [{keyword: 1}]}}}, "f.$defs.d.prefixItems[0]"),
    ):
        message = place_of(schema)
        assert message.startswith(f"{place}: ") and repr(keyword) in message


def test_words_are_keywords_only_where_a_schema_stands() -> None:
    enforceable({"enum": [{"not": 1}], "const": {"if": 2}, "properties": {"contains": INTEGER}}, "f")
    enforceable({"default": {"not": 1}, "examples": [{"then": 1}], "description": "else"}, "f")


def test_annotations_ask_nothing() -> None:
    schema = {word: "x" for word in ANNOTATIONS if word not in ("examples", "$schema", "contentSchema")}
    schema |= {"examples": [1], "contentSchema": {}, "type": "boolean"}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    compile_check(grammar_text(GrammarKind.JSON_SCHEMA, schema), load(), "f")


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"foo": "bar"}}, "f.properties.foo"),
        ({"properties": 5}, "f.properties"),
        ({"items": {"patternProperties": 5}}, "f.items.patternProperties"),
        ({"type": "array", "items": 1}, "f.items"),
        ({"format": "int32"}, "f.format is 'int32'"),
        ({"type": "integer", "format": "date"}, "strings only"),
        ({"multipleOf": 999983}, "multipleOf"),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]}, "multipleOf"),
        ({"multipleOf": 1e300}, "multipleOf"),
        ({"multipleOf": 19_997, "maximum": 10**9}, "f.multipleOf is 19997: the least common multiple"),
        ({"items": {"multipleOf": 0}}, "f.items.multipleOf is 0; it must be above 0"),
        (
            {"type": "integer", "minimum": 1e30},
            "f.minimum is 1e+30; bounds are enforced from -9007199254740991",
        ),
        ({"exclusiveMaximum": -(2**63)}, "f.exclusiveMaximum is -9223372036854775808"),
        ({"minimum": 5e-324}, "f.minimum is 5e-324"),
        ({"const": 2**53}, "f.const has the number 9007199254740992"),
        ({"const": -(2**63)}, "f.const has the number"),
        ({"enum": [1, {"a": [1e20]}]}, "f.enum has the number 1e+20"),
        (
            {"const": "a\x01b"},
            r"f.const has the text 'a\x01b'; no control characters but \b, \f, \n, \r and \t",
        ),
        ({"enum": [1, {"a": ["\x7f"]}]}, "f.enum has the text"),
        *[
            ({"pattern": text}, "no control characters but")
            for text in ("^a\x0bb$", r"\x{b}", r"\u001f", r"\v", r"^[\x00]$", "[[:x\x01:]]", "[\x0b]?")
        ],
        (
            {
                "oneOf": [
                    {"$id": "http://x/y", "$ref": "#/$defs/a", "$defs": {"a": {"minimum": 1}}},
                    INTEGER,
                ],
                "$defs": {"a": STRING},
            },
            "f.oneOf[0].$ref is '#/$defs/a'; below a part with an $id of its own",
        ),
        ({"propertyNames": {"minLength": 1}}, "f: the keyword 'propertyNames' is enforced where it lists"),
        ({"items": {"propertyNames": {"$ref": "#"}}}, "f.items: the keyword 'propertyNames'"),
        ({"propertyNames": {"enum": ["a"]}, "patternProperties": {"b": {}}}, "the keyword 'propertyNames'"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"b": {}}}, "the keyword 'propertyNames'"),
        ({"propertyNames": {"format": []}}, "f.propertyNames.format is []; it must be a string"),
        ({"propertyNames": {"enum": ["a"] * 1001}}, "f.propertyNames lists 1001 names; the limit is 1000"),
        ({"propertyNames": {"format": "hostname"}}, "the keyword 'propertyNames'"),
        ({"patternProperties": {"^\x01": {}}}, "no control characters but"),
        ({"$ref": "#/allOf/" + "1" * 5000, "allOf": [INTEGER]}, "which is not in this schema"),
        ({"minItems": 2**31}, "f.minItems is 2147483648; the limit is 2147483647"),
        ({"maxLength": -1}, "f.maxLength is -1; it must be a whole number"),
        ({"maxLength": 1.5}, "f.maxLength is 1.5"),
        ({"required": ["a", 1]}, "f.required is ['a', 1]; it must be a list of strings"),
        ({"items": {"pattern": "^(?!a)b"}}, "f.items.pattern is '^(?!a)b': look-around"),
        ({"pattern": r"(a)\\\1"}, "back-references"),
        ({"patternProperties": {"(?<=a)b": {}}}, "f.patternProperties is '(?<=a)b'"),
        ({"pattern": r"^a\b"}, "f.pattern is '^a\\\\b': look-around"),
        ({"anyOf": []}, "f.anyOf is []; it must be a list of one schema or more"),
        ({"type": ["string", "float"]}, "f.type is ['string', 'float']"),
        ({"exclusiveMinimum": True}, "f.exclusiveMinimum is true; it must be a number"),
        ({"pattern": "x{20000}"}, "f.pattern is 'x{20000}', which leaves no choice for 20000 characters"),
        ({"const": {"a": "x" * 10_001}}, "f.const has a text of 10001 characters; the limit is 10000"),
        ({"properties": {"x" * 10_001: {}}}, "f.properties has a text of 10001 characters"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "f.properties.a.$ref is '#/$defs/b', which is not in"),
        ({"items": [{"anyOf": [INTEGER] * MAX_SUBSCHEMAS}]}, f"more than {MAX_SUBSCHEMAS} schemas"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 1}, "f.$schema is 'http:"),
        ({"items": {"minProperties": 2}}, "f.items: the keyword 'minProperties' is not enforced above 1"),
        ({"required": ["a", "a"], "minProperties": 3}, "'minProperties' is not enforced above 2"),
        ({"$defs": {"d": {"$schema": 7}}}, "f.$defs.d.$schema is 7"),
        (
            {"items": {"prefixItems": [INTEGER], "additionalItems": False}},
            "f.items: the keyword 'prefixItems'",
        ),
        ({"prefixItems": [INTEGER], "items": [STRING]}, "f: the keyword 'prefixItems'"),
        *[
            ({"$schema": old, "items": {"prefixItems": [INTEGER]}}, "f.items: the keyword 'prefixItems'")
            for old in DRAFTS[1:]
        ],
        ({"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}, str(MAX_PROPERTIES)),
        ({"patternProperties": {f"^{i}": {} for i in range(MAX_PATTERN_PROPERTIES + 1)}}, "patternProp"),
    ],
)
def test_a_schema_out_of_bounds(schema: Any, named: str) -> None:
    assert named in place_of(schema)


def test_what_is_enforced_of_a_keyword_that_asks_for_less_than_can_be() -> None:
    """A bound that is wider than what is written at all, as of 64-bit integers; a count as a float."""
    wide = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1, "exclusiveMaximum": 1e300}
    made = {"type": "integer", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER, "exclusiveMaximum": MAX_NUMBER}
    assert enforceable(wide, "f") == made
    compile_check(grammar_text(GrammarKind.JSON_SCHEMA, wide), load(), "f")
    text = {"type": "string", "minLength": 2.0, "maxLength": 2**40, "default": 2**70}
    assert enforceable(text, "f") == {"type": "string", "minLength": 2, "maxLength": 2**31 - 1}
    free = {"type": "string", "pattern": r"^[(?=x](?P<n>a)(?<m>b)\\\\1$"}
    assert enforceable(free, "f") == free
    compile_check(grammar_text(GrammarKind.JSON_SCHEMA, free), load(), "f")
    old = {"$schema": DRAFTS[2], "items": [INTEGER], "additionalItems": STRING}
    assert enforceable(old, "f") == {"prefixItems": [INTEGER], "items": STRING}


@pytest.mark.parametrize(
    ("kind", "value", "run"),
    [
        (GrammarKind.REGEX, "x{100000}", 100_000),
        (GrammarKind.REGEX, "(?:hello world){1000}", 11_000),
        (GrammarKind.REGEX, "a|((?P<n>ab){10}c{0,9}){5}(y{110}){100}", 11_020),
        (GrammarKind.GRAMMAR, 'start: "x"{20000}', 20_000),
        (GrammarKind.GRAMMAR, 'start: a "y"\na: B{100}\nB: /x{200}/ "z"?\n', 0),
        (GrammarKind.GRAMMAR, 'start: a "y" | "z"\na: B ~ 100\nB: /x{200}/\n', 20_001),
        (GrammarKind.REGEX, "[a-z]{100000}", 0),
        (GrammarKind.REGEX, r"(\d|x){100000}", 0),
        (GrammarKind.REGEX, r"x{0,100000}\{{9000}(\.|\p{L}){100000}", 0),
        (GrammarKind.GRAMMAR, 'start: a{0,50000}\na: "x" /[0-9]/{50000}', 0),
    ],
)
def test_a_run_without_a_choice_is_bounded(kind: GrammarKind, value: str, run: int) -> None:
    """All streams would wait for its masks; what has a choice in each turn is as fast as one turn."""
    grammar = grammar_text(kind, value)
    if not run:
        compile_check(grammar, load(), "f")
        return
    with pytest.raises(APIError) as caught:
        compile_check(grammar, load(), "f")
    assert caught.value.message == f"f leaves no choice for {run} characters on end; the limit is {MAX_RUN}"


@pytest.mark.parametrize(
    "grammar",
    [
        grammar_text(
            GrammarKind.JSON_SCHEMA,
            {
                "$ref": "#/$defs/0",
                "$defs": {
                    **{str(i): {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(4000)},
                    "4000": INTEGER,
                },
            },
        ),
        grammar_text(
            GrammarKind.LARK, "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000)) + 'r6000: "a"'
        ),
    ],
    ids=["references", "rules"],
)
def test_a_chain_does_not_end_the_process(grammar: str) -> None:
    """The compiler follows it by recursion: on the usual stack that is a segmentation fault."""
    pool = compile_thread("test")
    pool.submit(compile_check, grammar, load(), "f").result()
    pool.shutdown()


def test_what_asks_nothing_is_left_out() -> None:
    plain = {"type": "array", "items": INTEGER}
    said = {
        "uniqueItems": False,
        "nullable": False,
        "x-order": 1,
        "x-guidance": {},
        "example": [1],
        "xml": {},
    }
    assert enforceable(plain | said, "f") == plain
    assert enforceable(plain | {"$defs": None, "minItems": None}, "f") == plain
    assert enforceable({"const": None}, "f") == {"const": None}
    for more in ({"uniqueItems": True}, {"nullable": True}):
        assert next(iter(more)) in place_of(plain | more)


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({"format": "int32"}, (-(2**31), 2**31 - 1)),
        ({"format": "uint8", "minimum": 3, "maximum": 1000}, (3, 255)),
        ({"format": "int64", "minimum": -5.0}, (-5.0, MAX_NUMBER)),
    ],
)
def test_a_numbers_format_is_its_bounds(schema: dict[str, Any], bounds: tuple[float, float]) -> None:
    made = enforceable({"type": "integer"} | schema, "f")
    assert made == {"type": "integer", "minimum": bounds[0], "maximum": bounds[1]}
    assert enforceable({"type": ["number", "null"], "format": "double"}, "f") == {"type": ["number", "null"]}
    assert "numbers only" in place_of({"type": "string"} | schema)


@pytest.mark.parametrize(
    ("bounds", "excluded", "right"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ("0", "0.0", "-0"), ("0.5", "0.001")),
        ({"exclusiveMinimum": 3, "maximum": 3.9}, ("3", "3.0"), ("3.1", "3.9")),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ("1", "1.5"), ("1.2",)),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ("0", "-0", "-0.0"), ("-0.5", "-0.1")),
        ({"exclusiveMinimum": 0, "maximum": 1}, ("0", "0.0"), ("1", "0.5")),
    ],
)
def test_excluded_bounds_are_excluded(bounds: Any, excluded: tuple[str, ...], right: tuple[str, ...]) -> None:
    """Within one unit the compiler allows a whole number that is excluded."""
    for schema in ({"type": "number"} | bounds, bounds):
        made = compile_check(grammar_text(GrammarKind.JSON_SCHEMA, schema), load(), "f")
        for text in right:
            load().compile(made).accept([*text.encode(), END])
        for text in excluded:
            with pytest.raises(GrammarError):
                load().compile(made).accept([*text.encode(), END])
    whole = {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5}
    assert enforceable(whole, "f") == whole


def test_depth_is_bounded_without_recursion() -> None:
    schema: dict[str, Any] = INTEGER
    for depth in range(100_000):
        if depth == MAX_DEPTH - 1:
            enforceable(schema, "f")
            compile_check(grammar_text(GrammarKind.JSON_SCHEMA, schema), load(), "f")
        schema = {"items": schema}
        if depth == MAX_DEPTH:
            assert str(MAX_DEPTH) in place_of(schema)
    assert str(MAX_JSON_DEPTH) in place_of(schema)
    with pytest.raises(APIError, match="deep"):
        read_structured_outputs("s", {"json": nested(5000)})


@pytest.mark.parametrize(
    "grammar",
    [
        *[
            grammar_text(GrammarKind.JSON_SCHEMA, schema)
            for schema in (
                {"type": "hiccup"},
                {"type": 123},
                {"$ref": "#/$defs/none"},
                {"$ref": "http://example.com/schema"},
                {"$ref": "#"},
                STRING | {"pattern": "([a-z"},
                STRING | {"pattern": "(" * 20_000 + ")" * 20_000},
                {"enum": []},
                {"type": "object", "required": "a"},
                {"type": "integer", "minimum": 5, "maximum": 3},
                {"oneOf": [{"minimum": 1}, {"maximum": 2}]},
                {"const": "\ud83d"},
            )
        ],
        *[grammar_text(GrammarKind.REGEX, text) for text in ("(unclosed", "(" * 16_000, "")],
        *[
            grammar_text(GrammarKind.GRAMMAR, text)
            for text in ("", "start: nothing", 'start: ""', "%import x (Y)", "root ::= " + "(" * 30_000)
        ],
    ],
)
def test_a_grammar_that_cannot_be_used(grammar: str) -> None:
    with pytest.raises(APIError) as caught:
        compile_check(grammar, load(), "f")
    error = caught.value
    assert (error.status, error.param, error.code) == (400, "f", "invalid_grammar")
    assert error.message[:2] in ("f:", "f.", "f ") and "\n" not in error.message and len(error.message) < 400


def test_the_librarys_own_failures_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it panics with speaks of its source; what it says of a grammar is told."""
    panic = "panic: index out of bounds at parser/src/earley/parser.rs:12\n   0: rust_begin_unwind\n"

    class Failed:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        grammar_from_regex = staticmethod(lambda text: text)
        is_error = staticmethod(lambda: True)
        get_error = staticmethod(lambda: panic)

    monkeypatch.setattr("servelite.tokenizer.grammar.llguidance.LLMatcher", Failed)
    with pytest.raises(APIError) as caught:
        compile_check(grammar_text(GrammarKind.REGEX, "a"), load(), "f")
    assert caught.value.message == "f: the grammar library cannot follow it"


def test_what_a_client_asks_for_becomes_a_grammar() -> None:
    def chat(**fields: Any) -> Any:
        return read_chat({"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields)

    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": INTEGER, "strict": True}}
    wanted = grammar_text(GrammarKind.JSON_SCHEMA, INTEGER)
    assert chat(response_format=form).options.grammar == wanted
    assert chat(response_format={"type": "text"}).options.grammar == ""
    assert chat(response_format={"type": "json_object"}).options.grammar == grammar_text(
        GrammarKind.JSON_OBJECT
    )
    assert chat(structured_outputs={"json": json.dumps(INTEGER)}).sampling.structured_outputs == wanted
    assert chat(response_format={"type": "json_object", "schema": INTEGER}).options.grammar == grammar_text(
        GrammarKind.JSON_OBJECT, INTEGER
    )
    older = chat(guided_json=INTEGER, guided_decoding_backend="auto").options
    assert (older.grammar, older.grammar_field) == (wanted, "guided_json")
    both = chat(guided_choice=["a"], structured_outputs={"choice": ["a"]})
    assert both.options.grammar == "" and both.sampling.structured_outputs
    with pytest.raises(APIError, match="give response_format or guided_regex, not both"):
        chat(response_format=form, guided_regex="a")
    with pytest.raises(APIError, match="not both"):
        chat(response_format=form, structured_outputs={"regex": "a"})
    gbnf = read_structured_outputs("s", {"grammar": 'root ::= "a" b\nb ::= [0-9]'})
    assert text_by(compile_check(gbnf, load(), "s"), 1) in {f"a{digit}" for digit in range(10)}
    assert read_response_format("r", form) == wanted


def test_whitespace_is_bounded_and_keys_have_one_spelling() -> None:
    """Such a text would go on for ever, such a key would escape its schema."""
    schema = {"type": "object", "properties": {"a/b": INTEGER}}
    for grammar in (
        grammar_text(GrammarKind.JSON_SCHEMA, schema),
        grammar_text(GrammarKind.LARK, "start: " + json_rule(schema)),
    ):
        for text in ('{"a/b": 1}', '{"a/b":1}', json.dumps({"a/b": 1, "c": [{"d": {}}]}, indent=8)):
            load().compile(grammar).accept(list(text.encode()))
        for text in ("{  ", "{\n\n", "{\n" + " " * 33, '{"a\\/b":"x"', '{"\\u0061/b":"x"', '{"a/b":"x"'):
            with pytest.raises(GrammarError):
                load().compile(grammar).accept(list(text.encode()))
    load().compile(grammar_text(GrammarKind.JSON_OBJECT)).accept(list(b'{"a": [1, {"b": null}]}'))
    with pytest.raises(GrammarError):
        load().compile(grammar_text(GrammarKind.JSON_OBJECT)).accept(list(b"["))


@pytest.mark.parametrize("pattern", ["[a-z]", "^a$"])
def test_what_does_not_go_together_is_said_in_our_words(pattern: str) -> None:
    with pytest.raises(APIError, match="pattern") as caught:
        schema = STRING | {"pattern": pattern, "minLength": 1000}
        compile_check(grammar_text(GrammarKind.JSON_SCHEMA, schema), load(), "f")
    assert "Regex" not in caught.value.message


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (
            {"properties": {"a": STRING, "b": {"items": STRING | {"pattern": r"\p{Foo}"}}}},
            ".properties.b.items",
        ),
        ({"anyOf": [INTEGER, STRING | {"pattern": "("}]}, ".anyOf[1]"),
        ({"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}, ".properties.x"),
        (INTEGER | {"minimum": 3, "maximum": 2}, ""),
    ],
)
def test_what_the_compiler_refuses_is_told_with_its_place(schema: dict[str, Any], place: str) -> None:
    whole = {"type": "object", "properties": {"a": INTEGER, "part": schema}, "required": ["part"]}
    whole["$defs"] = {"a": {"enum": []}}
    with pytest.raises(APIError) as caught:
        compile_check(grammar_text(GrammarKind.JSON_SCHEMA, whole), load(), "f")
    assert caught.value.message.startswith(f"f.properties.part{place}: ")
    assert "'part'" not in caught.value.message, "the reason is that part's own"
    whole["properties"]["a"] = {"$ref": "#/properties/part"}
    with pytest.raises(APIError, match=r"^f: "):  # no part can be looked at alone
        compile_check(grammar_text(GrammarKind.JSON_SCHEMA, whole), load(), "f")


def test_a_control_token_is_no_text() -> None:
    matcher, words = load().compile(grammar_text(GrammarKind.REGEX, "<end>|x")), np.zeros(9, np.uint32)
    matcher.fill(words)
    allowed = np.flatnonzero(unpack_bits(words.view(np.uint8)[None], len(PIECES))[0])
    assert {PIECES[token] for token in allowed} == {b"<", b"x"}
