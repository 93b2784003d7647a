"""Forced calls: whatever a model draws under the grammar is read as calls that fit their schemas."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servelite.frontend.errors import APIError
from servelite.frontend.forced_calls import CallableFunction, chat_grammar, functions_of
from servelite.frontend.grammar_check import compile_check
from servelite.frontend.lark import SplitControls
from servelite.frontend.parsers.formats import (
    REASONING_FORMAT_NAMES,
    TOOL_FORMAT_NAMES,
    Begin,
    ChatFormats,
    tool_format,
)
from servelite.frontend.parsers.sink import CallRules
from servelite.frontend.tools import ToolChoice, ToolUse
from servelite.tokenizer.grammar import Grammars
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.engine.test_grammars import load
from tests.frontend.field_cases import nested
from tests.frontend.parsers.samples import read, reasoning_format

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", 'Münster 東京 😀 "q" \\']},
        "unit": {"enum": ["c", "f"], "type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "exact": {"type": "boolean"},
        "spots": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "maxItems": 2},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "at"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "ping": NOTHING}


def tool(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def use(name: str = "", *, parallel: bool = True) -> ToolUse:
    choice = ToolChoice("named", name) if name else ToolChoice("required")
    return ToolUse(tuple(tool(n, s) for n, s in SCHEMAS.items()), choice, parallel)


def fits(name: str, arguments: Any) -> bool:
    """Whether arguments are what the function's schema says."""
    if name == "ping":
        return bool(arguments == {})
    allowed = WEATHER["properties"]
    checks = {
        "city": lambda value: value in allowed["city"]["enum"],
        "unit": lambda value: value in ("c", "f"),
        "days": lambda value: type(value) is int and 0 <= value <= 9,
        "exact": lambda value: type(value) is bool,
        "spots": lambda value: len(value) <= 2 and set(value) <= {"a", "b"},
        "at": lambda value: list(value) == ["x"] and value["x"] in (1, 2, 3),
    }
    return {"city", "at"} <= set(arguments) and all(checks[key](value) for key, value in arguments.items())


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(open_model_files(demo_model))


def checked(asked: ToolUse) -> list[CallableFunction]:
    """The functions, their schemas as the service has them checked."""
    return [one.following(compile_check(one.grammar, load(), one.place)) for one in functions_of(asked)]


def forced(asked: ToolUse, chosen: ChatFormats, split: SplitControls, begin: Begin = Begin.ANYWHERE) -> str:
    return chat_grammar(checked(asked), "", chosen, split, parallel=asked.parallel, begin=begin)


def answer_after(answer: str, chosen: ChatFormats, split: SplitControls, *, begin: Begin) -> str:
    return chat_grammar([], answer, chosen, split, parallel=True, begin=begin)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


@functools.cache
def formats(tools: str, reasoning: str = "") -> ChatFormats:
    return ChatFormats(tool_format(tools), reasoning_format(reasoning))


def drawn(
    grammars: Grammars, tokenizer: Tokenizer, grammar: str, seed: int, begun: str = "", most: int = 400
) -> str:
    """A text that goes on after `begun` with any tokens the grammar allows, ending as soon as it may."""
    draw, matcher = np.random.default_rng(seed), grammars.compile(grammar)
    spaces = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token).isspace()]
    ids = tokenizer.encode(begun, add_special_tokens=False, parse_special=True)
    matcher.accept(ids)
    for _ in range(most):
        words = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        matcher.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if matcher.end_ids.intersection(allowed[:100].tolist()):
            return tokenizer.decode(ids, skip_special_tokens=False)
        if draw.random() < 0.9 and len(others := np.setdiff1d(allowed, spaces)):
            allowed = others  # white space may come, and come again
        ids.append(int(draw.choice(allowed)))
        matcher.accept(ids[-1:])
    raise AssertionError(f"no end: {tokenizer.decode(ids)[:300]}")


@pytest.mark.parametrize("form", TOOL_FORMAT_NAMES)
def test_what_is_drawn_is_a_call(form: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    for name in ("get_weather", "ping", ""):
        grammar = forced(use(name), formats(form), tokenizer.split_controls)
        for seed in range(3):
            text = drawn(grammars, tokenizer, grammar, seed)
            found = read([text], form, rules=CallRules(SCHEMAS))
            assert found.content == "" and found.ends_in_calls, text
            for called, arguments in found.parsed:
                assert called == name or not name
                assert fits(called, arguments), arguments


@pytest.mark.parametrize("form", TOOL_FORMAT_NAMES)
def test_more_than_one_call(form: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    written = tool_format(form).written
    ping = f"{written.start}ping{written.middle}" + {"json": "{}", "braces": "{}"}.get(written.arguments, "")
    two = written.first + (ping + written.end + (written.joint or "")) * 2
    two = two.removesuffix(written.joint or "") + written.last
    for parallel in (True, False):
        grammar = forced(
            use(parallel=parallel), formats(form), tokenizer.split_controls, begin=Begin.ANYWHERE
        )
        matcher = grammars.compile(grammar)
        ids = tokenizer.encode(two, add_special_tokens=False, parse_special=True)
        if parallel and written.joint is not None:
            matcher.accept(ids)
            assert read([two], form, rules=CallRules(SCHEMAS)).parsed == [("ping", {})] * 2
        else:
            with pytest.raises(ValueError, match="does not allow"):
                matcher.accept(ids)


@pytest.mark.parametrize("name", REASONING_FORMAT_NAMES)
@pytest.mark.parametrize("opened", [False, True])
def test_a_grammar_begins_where_reasoning_ends(
    name: str, opened: bool, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    form = reasoning_format(name)
    assert form is not None
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]} | {
        "additionalProperties": False
    }
    if form.opening:
        thought = ("" if opened else form.opening) + 'Hm {"a": <x> 3}\n' + form.closing
        begun = {"calls": thought, "answer": thought}
    else:
        opened = False
        thought = '<|channel|>analysis<|message|>Hm {"a": 3}<|end|><|start|>assistant'
        begun = {"calls": thought, "answer": thought + "<|channel|>final<|message|>"}
    tools = "openai" if not form.opening else "hermes"
    split, begin = tokenizer.split_controls, Begin.INSIDE if opened else Begin.ANYWHERE
    grammar = forced(use("ping"), formats(tools, name), split, begin)
    for seed in range(3):
        text = drawn(grammars, tokenizer, grammar, seed, begun["calls"])
        found = read([text], tools, name, rules=CallRules(SCHEMAS), opened=opened)
        assert (found.parsed, found.content) == ([("ping", {})], "")
        assert found.reasoning.startswith("Hm {")
    for kind, value, valid in (
        (GrammarKind.JSON_SCHEMA, schema, lambda text: json.loads(text)["a"] in (1, 2)),
        (GrammarKind.REGEX, r"a/\/[bc/]", lambda text: text[:3] == "a//" and len(text) == 4),
        (GrammarKind.CHOICE, ['x"', "yé"], lambda text: text in ('x"', "yé")),
        (GrammarKind.LARK, 'start: "v" r1\nr1: /[0-9]{3}/', lambda text: text[0] == "v" and len(text) == 4),
    ):
        grammar = answer_after(grammar_text(kind, value), formats(tools, name), split, begin=begin)
        found = read(
            [drawn(grammars, tokenizer, grammar, 1, begun["answer"])], "", name, rules=None, opened=opened
        )
        assert found.reasoning.startswith("Hm {") and valid(found.content)
    if form.opening:  # it may not think again
        value = grammar_text(GrammarKind.CHOICE, ["v"])
        closed = answer_after(value, formats(tools, name), split, begin=Begin.AFTER)
        assert drawn(grammars, tokenizer, closed, 1) == "v"
    if not opened and form.opening:  # it need not think
        found = read([drawn(grammars, tokenizer, grammar, 1, "v")], "", name, rules=None)
        assert found.content.startswith("v")


def test_a_call_or_an_answer_of_a_form(grammars: Grammars, tokenizer: Tokenizer) -> None:
    either = chat_grammar(
        checked(use()),
        grammar_text(GrammarKind.CHOICE, ["yes", "no"]),
        formats("hermes", "qwen3"),
        tokenizer.split_controls,
        parallel=True,
        begin=Begin.AFTER,
    )
    assert drawn(grammars, tokenizer, either, 1, "y") == "yes"
    call = read([drawn(grammars, tokenizer, either, 1, "<tool")], "hermes", rules=CallRules(SCHEMAS))
    assert len(call.parsed) == 1 and call.content == ""


def test_only_strict_schemas_have_to_be_enforced(grammars: Grammars, tokenizer: Tokenizer) -> None:
    odd = {
        "type": "object",
        "properties": {"not": {"type": "array", "uniqueItems": True, "items": {"type": "string", "x-a": 1}}},
        "not": {"required": ["z"]},
        "format": "color",
    }
    loose = ToolUse((tool("f", odd),), ToolChoice("required"))
    grammars.compile(forced(loose, formats("hermes"), tokenizer.split_controls))
    strict = ToolUse((tool("g", NOTHING), tool("f", odd, strict=True)), ToolChoice("required"))
    with pytest.raises(APIError) as caught:
        forced(strict, formats("hermes"), tokenizer.split_controls)
    assert caught.value.param == "tools[1].function.parameters" and "not" in caught.value.message


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"minimum": 3}}}),
        (
            "qwen3_coder",
            {"type": "object", "properties": {"a": {"type": ["string", "array"], "maxLength": 10_000}}},
        ),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"const": "x</parameter>"}}}),
        (
            "qwen3_coder",
            {
                "properties": {"a": {"$ref": "#/$defs/s", "maxLength": 9}},
                "$defs": {"s": {"enum": ["x", "yy"]}},
            },
        ),
        ("qwen3_coder", {"$ref": "#/$defs/o", "required": ["a"], "$defs": {"o": {"properties": {"a": {}}}}}),
        ("functiongemma", {"type": "object", "properties": {"a": {}}}),
        ("functiongemma", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}),
        ("functiongemma", {"type": "object", "properties": {"a": {"type": "array", "minItems": 1}}}),
        ("pythonic", {"type": "object", "properties": {}, "minProperties": 1}),
    ],
)
def test_what_a_format_cannot_enforce_is_refused_where_strict(
    form: str, schema: Any, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    for strict in (False, True):
        asked = ToolUse((tool("f", schema, strict=strict),), ToolChoice("required"))
        if strict:
            with pytest.raises(APIError) as caught:
                forced(asked, formats(form), tokenizer.split_controls)
            assert caught.value.param == "tools[0].function.parameters" and form in caught.value.message
        else:
            grammars.compile(forced(asked, formats(form), tokenizer.split_controls))


UNIONS: list[dict[str, Any]] = [
    {"type": ["string", "null"], "maxLength": 4},
    {"type": ["string", "integer"], "minimum": 3, "maximum": 9, "minLength": 2, "maxLength": 4},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "number"}, {"type": "boolean"}], "title": "A"},
    {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "string", "maxLength": 3}, {"type": "null"}]},
    {"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "array", "items": {"$ref": "#/$defs/colour"}}]},
    {"enum": ["red", "3", 3, None, "null", True]},
    {"type": "integer", "enum": [1, 2.0, 2.5, "x"]},
    {"$ref": "#/$defs/colour"},
    {"type": "string", "minLength": 1, "maxLength": 3},
    {"$ref": "#/properties/b"},
    {"oneOf": [{"$ref": "#/$defs/point"}, {"$ref": "#/$defs/line"}]},
    {"anyOf": [False, {"type": "boolean"}, {"enum": [1, 2, 3, 4, 5]}]},
    {"type": "string", "maxLength": 2**40, "enum": ["a", "b"]},
    {"type": "string", "minLength": 2, "maxLength": 3, "enum": ["a", "bb", "cc", "dd", "ee", "dddd"]},
    {"allOf": [{"$ref": "#/$defs/colour"}], "default": "red", "title": "as pydantic 1 writes it"},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2**40, "const": "a"}]},
]
DEFS: dict[str, Any] = {
    "point": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    | {"additionalProperties": False},
    "line": {"type": "object", "properties": {"z": {"enum": [3]}, "x": {"enum": [4]}}, "required": ["x"]}
    | {"additionalProperties": False},
    "colour": {"type": "string", "enum": ["red", "7", "blue"]},
}


@pytest.mark.parametrize("form", ["qwen3_coder", "functiongemma", "gemma4", "pythonic", "hermes"])
@pytest.mark.parametrize("schema", UNIONS)
def test_a_value_of_several_types(form: str, schema: Any, grammars: Grammars, tokenizer: Tokenizer) -> None:
    """It is enforced where values have no quotes that JSON knows, strict or not."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    whole = {
        "type": "object",
        "properties": {"b": {"type": ["string", "boolean"], "maxLength": 2}, "a": schema, "c": False},
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": DEFS,
    }
    for strict in (True, False):
        asked = ToolUse((tool("f", whole, strict=strict),), ToolChoice("required"), parallel=False)
        grammar = forced(asked, formats(form), tokenizer.split_controls)
        seen = set()
        for seed in range(6 if strict else 1):
            text = drawn(grammars, tokenizer, grammar, seed)
            ((_, arguments),) = read([text], form, rules=CallRules({"f": whole})).parsed
            jsonschema.Draft202012Validator(whole).validate(arguments)
            seen.add(json.dumps(arguments["a"]))
        assert len(seen) > 1 or not strict


@pytest.mark.parametrize("form", ["qwen3_coder", "functiongemma", "gemma4"])
def test_the_length_of_a_text_is_cheap_to_enforce(
    form: str, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """Together with what the text may not hold or be, large ones took seconds, or more than is allowed."""
    for one in ({"type": "string"}, {"type": ["string", "null", "number"]}):
        for lengths in ({"maxLength": 10_000}, {"maxLength": 2**40}, {"minLength": 900, "maxLength": 5000}):
            schema = {"type": "object", "properties": {"a": one | lengths}, "required": ["a"]}
            asked = ToolUse((tool("f", schema, strict=True),), ToolChoice("required"))
            began = time.thread_time()
            grammars.compile(forced(asked, formats(form), tokenizer.split_controls))
            assert time.thread_time() - began < 1


@pytest.mark.parametrize("form", ["gemma4", "functiongemma"])
def test_a_value_of_which_little_is_said_is_of_its_type(
    form: str, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    text = {"type": "string", "allOf": [{"pattern": "x"}]}
    properties = {"list": {"type": "array"}, "object": {"type": "object", "minProperties": 0}, "text": text}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    asked = ToolUse((tool("f", schema),), ToolChoice("required"), parallel=False)
    grammar = forced(asked, formats(form), tokenizer.split_controls)
    written, q = tool_format(form).written, tool_format(form).quote
    for list_, object_, text, right in (
        *(("[1,[null]]", "{a:{b:1}}", f"{q}x{q}", True), ("[]", "{}", q + q, True)),
        *(("5", "{}", q + q, False), ("[]", "[]", q + q, False), ("[]", "{}", "5", False)),
    ):
        call = f"{written.first}{written.start}f{written.middle}{{list:{list_},object:{object_},text:{text}}}"
        ids = tokenizer.encode(call, add_special_tokens=False, parse_special=True)
        if right:
            grammars.compile(grammar).accept(ids)
        else:
            with pytest.raises(ValueError, match="does not allow"):
                grammars.compile(grammar).accept(ids)


@pytest.mark.parametrize("form", ["gemma4", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    "defs",
    [
        {"a": {"$ref": "#/$defs/a"}},
        {"a": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in "abcdefgh"]}}
        | {
            name: {"anyOf": [{"type": "boolean"}, *({"$ref": f"#/$defs/{name}"} for name in "abcdefgh")]}
            for name in "bcdefgh"
        },
        {"a": {"$ref": "#/$defs/0"}, "1500": {"type": "boolean"}}
        | {
            str(i): {"properties": {"p": {"$ref": f"#/$defs/{i + 1}"}}, "type": "object"} for i in range(1500)
        },
    ],
    ids=["itself", "each other", "a chain"],
)
def test_references_are_followed_to_an_end(form: str, defs: Any, tokenizer: Tokenizer) -> None:
    """Such arguments held up the front end for ever."""
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": defs}
    function = CallableFunction("f", schema, False, "p")
    began = time.thread_time()
    chat_grammar([function], "", formats(form), tokenizer.split_controls, parallel=True, begin=Begin.ANYWHERE)
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic"])
def test_definitions_that_each_parameter_is_written_with_are_bounded(form: str, tokenizer: Tokenizer) -> None:
    """A schema of 200 kB became a grammar of 200 MB."""
    properties = {f"p{i}": {"$ref": "#/$defs/d"} for i in range(1000)}
    schema = {"type": "object", "properties": properties, "$defs": {"d": {"enum": [["x" * 100]] * 1000}}}
    function = CallableFunction("f", schema, False, "p")
    with pytest.raises(APIError, match="over 4194304 characters") as caught:
        chat_grammar(
            [function], "", formats(form), tokenizer.split_controls, parallel=True, begin=Begin.AFTER
        )
    assert caught.value.param == "p"


@pytest.mark.parametrize("form", ["qwen3_coder", "functiongemma"])
def test_arguments_that_are_a_reference(form: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    """As of a model that is a part of itself; a required property that is not declared is written too."""
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}
    node |= {"required": ["next", "z"], "additionalProperties": {"type": "boolean"}}
    schema = {"$ref": "#/$defs/N", "$defs": {"N": node}}
    asked = ToolUse((tool("f", schema, strict=form != "functiongemma"),), ToolChoice("required"))
    text = drawn(grammars, tokenizer, forced(asked, formats(form), tokenizer.split_controls), 1)
    ((_, arguments),) = read([text], form, rules=CallRules({"f": schema})).parsed[:1]
    assert {"next", "z"} == set(arguments) and arguments["z"] in (True, False)


@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic", "hermes"])
def test_a_value_that_looks_like_a_reference_is_none(
    form: str, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    value = {"enum": [{"$ref": "#/x"}]}
    properties = {"a": value, "b": {"$ref": "#/properties/a"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    schema["additionalProperties"] = False
    asked = ToolUse((tool("f", schema, strict=True),), ToolChoice("required"), parallel=False)
    text = drawn(grammars, tokenizer, forced(asked, formats(form), tokenizer.split_controls), 1)
    ((_, arguments),) = read([text], form, rules=CallRules({"f": schema})).parsed
    assert arguments == {"a": {"$ref": "#/x"}, "b": {"$ref": "#/x"}}


def test_what_a_value_cannot_be_enforced_by_is_left_out(tokenizer: Tokenizer) -> None:
    """Of a schema that is not strict; the rest of it is followed."""
    properties = {
        "look": {"type": "string", "pattern": "^(?=a)b", "maxLength": 3},
        "remote": {"$ref": "https://example.com/x"},
        "overlapping": {"type": "object", "patternProperties": {"^a": {"type": "null"}, "b$": {}}},
        "alike": {"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 7}]},
        "large": {"type": "integer", "minimum": 1e30},
        "long": {"type": "array", "items": {"type": "string", "pattern": "x{20000}"}, "maxItems": 2},
        "deep": {"items": nested(55)},
        "odd": {"type": "strange", "enum": [1]},
        "kept": {"type": "boolean"},
    }
    schema = {"type": "object", "properties": properties, "required": ["kept"], "additionalProperties": False}
    (function,) = checked(ToolUse((tool("f", schema),), ToolChoice("required")))
    made = function.schema["properties"]
    assert made["look"] == {"type": "string", "maxLength": 3} and made["remote"] == {}
    assert made["overlapping"] == {"type": "object"} and made["odd"] == {"enum": [1]}
    assert "anyOf" in made["alike"] and made["large"] == {"type": "integer"}
    assert made["long"] == {"type": "array", "items": {"type": "string"}, "maxItems": 2}
    assert made["kept"] == {"type": "boolean"} and function.schema["required"] == ["kept"]
    for name in ("look", "remote", "overlapping", "alike", "large", "long", "deep", "odd"):
        only = {"type": "object", "properties": {name: properties[name]}}
        with pytest.raises(APIError) as caught:
            checked(ToolUse((tool("f", only, strict=True),), ToolChoice("required")))
        assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("form", "key"), [("pythonic", "a-b"), ("qwen3_coder", "a b"), ("gemma4", "a:{"), ("functiongemma", "é")]
)
def test_a_parameter_that_cannot_be_written_is_refused_or_left_out(
    form: str, key: str, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {key: {"type": "integer"}}}
    for more, strict in (({"required": [key]}, False), ({}, True)):
        asked = ToolUse((tool("f", schema | more, strict=strict),), ToolChoice("required"))
        with pytest.raises(APIError) as caught:
            forced(asked, formats(form), tokenizer.split_controls)
        assert caught.value.param == "tools[0].function.parameters" and repr(key) in caught.value.message
        grammars.compile(forced(asked, formats("hermes"), tokenizer.split_controls))
    loose = forced(
        ToolUse((tool("f", schema),), ToolChoice("required")), formats(form), tokenizer.split_controls
    )
    ((_, arguments), *_) = read(
        [drawn(grammars, tokenizer, loose, 1)], form, rules=CallRules({"f": schema})
    ).parsed
    assert arguments == {}
