"""For each declared field: values that are taken and values that are refused, made from its declaration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from servelite.frontend.fields import (
    MAX_TOKEN_ID,
    Boolean,
    Custom,
    Field,
    Harmless,
    Integer,
    JSONObject,
    Number,
    Object,
    OneOf,
    Only,
    Refused,
    String,
    Strings,
    TokenBias,
    TokenIDs,
)
from servelite.frontend.grammars import (
    MAX_CHOICE_CHARS,
    MAX_GRAMMAR_CHARS,
    MAX_NAME_CHARS,
    MAX_REGEX_CHARS,
    MAX_SCHEMA_CHARS,
)
from servelite.frontend.grammars import MAX_CHOICES as MAX_GRAMMAR_CHOICES
from servelite.frontend.prompts import MAX_MESSAGES, MAX_PROMPTS
from servelite.frontend.tools import MAX_TOOLS
from tests.frontend.translated_fields import TRANSLATED

HI = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Case:
    """A value of a field; `limits`: what an error about it must name."""

    kind: str  # "low", "high", "within", "below", "above", "type"
    value: Any
    taken: bool
    limits: tuple[str, ...] = ()


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def tools(count: int) -> list[dict[str, Any]]:
    """Functions with names of their own."""
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]


def function(**fields: Any) -> list[dict[str, Any]]:
    """One function."""
    return [{"type": "function", "function": {"name": "f"} | fields}]


NAMED = {"type": "function", "function": {"name": "add"}}


def allowed(tools: Any, mode: Any = "required") -> dict[str, Any]:
    """A `tool_choice` of these functions."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


BOOLEAN = {"type": "boolean"}


def nested(depth: int) -> dict[str, Any]:
    """An object in an object, `depth` in all."""
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def _format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema} | more}


CUSTOM: dict[str, list[Case]] = {
    "response_format": [
        *[Case("within", {"type": kind}, True) for kind in ("text", "json_object")],
        Case("within", _format(BOOLEAN), True),
        Case("within", _format(BOOLEAN, strict=False, description="d"), True),
        Case("high", _format(BOOLEAN, name="n" * MAX_NAME_CHARS), True),
        Case("above", _format(BOOLEAN, name="n" * (MAX_NAME_CHARS + 1)), False, (str(MAX_NAME_CHARS),)),
        Case("above", _format({"const": "x" * MAX_SCHEMA_CHARS}), False, (str(MAX_SCHEMA_CHARS),)),
        Case("below", _format(BOOLEAN, name=""), False),
        *[Case("type", {"type": kind}, False) for kind in ("sound", 1, None, "json_schema")],
        *[Case("type", _format(schema), False) for schema in (None, [], "x", True)],
        *[Case("type", _format(BOOLEAN, **{k: 1}), False) for k in ("name", "strict", "description", "odd")],
        Case("type", {"type": "json_schema", "schema": BOOLEAN}, False),
        Case("within", {"type": "json_object", "schema": BOOLEAN}, True),
        *[Case("type", {"type": "json_object", "schema": schema}, False) for schema in ([], "x", True)],
        Case("type", {"type": "text", "schema": BOOLEAN}, False),
        *[Case("type", value, False) for value in (1, "text", [], {}, {"type": "text", "odd": 1})],
    ],
    "structured_outputs": [
        *[Case("within", {"json": schema}, True) for schema in ({}, BOOLEAN, '{"type": "boolean"}')],
        Case("within", {"regex": "a+"}, True),
        Case("high", {"regex": "a" * MAX_REGEX_CHARS}, True),
        Case("above", {"regex": "a" * (MAX_REGEX_CHARS + 1)}, False, (str(MAX_REGEX_CHARS),)),
        Case("high", {"choice": ["x" * MAX_CHOICE_CHARS]}, True),
        Case("above", {"choice": ["x" * (MAX_CHOICE_CHARS + 1)]}, False, (str(MAX_CHOICE_CHARS),)),
        Case("above", {"choice": ["x"] * (MAX_GRAMMAR_CHOICES + 1)}, False, (str(MAX_GRAMMAR_CHOICES),)),
        Case("below", {"choice": []}, False),
        *[Case("within", {"grammar": text}, True) for text in ('start: "a"', 'root ::= "a"')],
        Case("above", {"grammar": "a" * (MAX_GRAMMAR_CHARS + 1)}, False, (str(MAX_GRAMMAR_CHARS),)),
        *[
            Case("type", {"grammar": f"start: {word} {{}}"}, False)
            for word in ("%json", "x[temperature = 1]", "x[temperature\t=1]")
        ],
        *[Case("type", {"json": schema}, False) for schema in (1, [], "[1]", "{", True)],
        *[Case("type", {kind: 1}, False) for kind in ("regex", "choice", "grammar", "odd")],
        Case("type", {"choice": [1]}, False),
        *[Case("type", value, False) for value in (1, "a", [], {}, {"regex": "a", "choice": ["a"]})],
    ],
    "tools": [
        Case("low", [], True),
        Case("within", [ADD], True),
        Case("within", function(description="d", parameters={}, strict=True), True),
        *[
            Case("within", function(parameters={"type": kind, "properties": None}), True)
            for kind in ("object", None, ["object"], ["object", "null"])
        ],
        Case("within", [ADD | {"cache_control": {"type": "ephemeral"}}], True),
        Case("high", tools(MAX_TOOLS), True),
        Case("above", tools(MAX_TOOLS + 1), False, (str(MAX_TOOLS),)),
        Case("above", function(name="x" * 129), False, ("128",)),
        Case("twice", [ADD, ADD], False, ("add",)),
        *[
            Case("type", value, False)
            for value in (
                "x",
                1,
                {},
                [1],
                [{}],
                [{"type": "function"}],
                [ADD | {"type": "sound"}],
                [ADD | {"odd": 1}],
                function(name=""),
                function(name="a b"),
                function(name=1),
                function(description=1),
                function(odd=1),
                function(strict="yes"),
                function(parameters=[]),
                function(parameters={"type": "string"}),
                function(parameters={"properties": []}),
                [{"type": "function", "function": {"description": "d"}}],
            )
        ],
    ],
    "tool_choice": [
        *[Case("within", value, True) for value in ("none", "auto", "required")],
        Case("within", NAMED, True),
        Case("within", allowed([NAMED], mode="auto"), True),
        Case("within", allowed([NAMED]), True),
        *[
            Case("type", value, False)
            for value in (
                "sometimes",
                1,
                True,
                [],
                {},
                {"type": "function"},
                {"type": "function", "function": {}},
                {"type": "function", "function": {"name": "nope"}},
                {"type": "function", "function": {"name": "add", "odd": 1}},
                *(allowed([NAMED], mode=mode) for mode in ("none", None, 1)),
                *(allowed(tools) for tools in ([], None, "add", [1], ["add"], [NAMED | {"odd": 1}])),
                {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
            )
        ],
    ],
    "messages": [
        Case("low", HI, True),
        Case("high", HI * MAX_MESSAGES, True),
        Case("below", [], False),
        Case("above", HI * (MAX_MESSAGES + 1), False, (str(MAX_MESSAGES),)),
        *[Case("type", value, False) for value in ("hi", 1, {}, [1], [[]], [{}])],
        *[Case("type", [{"role": "assistant", "tool_calls": value}], False) for value in (0, "", {})],
    ],
    "prompt": [
        Case("low", "", True),
        Case("low", [0], True),
        Case("high", [["x"] * MAX_PROMPTS][0], True),
        Case("below", [], False),
        Case("below", [[]], False),
        Case("above", ["x"] * (MAX_PROMPTS + 1), False, (str(MAX_PROMPTS),)),
        *[Case("type", value, False) for value in (1, True, {}, [1.5], ["x", 1], [[["x"]]])],
    ],
}


CUSTOM["input"] = CUSTOM["prompt"]
for kind in ("json", "regex", "choice", "grammar"):
    CUSTOM[f"guided_{kind}"] = [
        replace(case, value=case.value[kind])
        for case in CUSTOM["structured_outputs"]
        if isinstance(case.value, dict) and list(case.value) == [kind]
    ]


def cases(field: Field) -> list[Case]:
    """The field's cases; raises for a type that has none here."""
    match field.type:
        case Integer(low, high):
            limits = (str(low), str(high))
            return [
                Case("low", low, True),
                Case("high", high, True),
                Case("below", low - 1, False, limits),
                Case("above", high + 1, False, limits),
                *wrong("1", True, 1.5, [low], {}),
            ]
        case Number(low, high, above_low):
            limits = (f"{low:g}", f"{high:g}")
            under = low if above_low else math.nextafter(low, -math.inf)
            return [
                Case("low", math.nextafter(low, math.inf) if above_low else low, True),
                Case("high", high, True),
                Case("below", under, False, limits),
                Case("above", math.nextafter(high, math.inf), False, limits),
                Case("above", 10**400, False, limits),
                *wrong("1", True, [low], {}),
            ]
        case Boolean():
            return [Case("low", False, True), Case("high", True, True), *wrong(0, 1, "true", [], {})]
        case String(most):
            return [
                Case("low", "", True),
                Case("high", "x" * most, True),
                Case("above", "x" * (most + 1), False, (str(most),)),
                *wrong(1, True, ["x"], {}),
            ]
        case Strings(most, chars):
            return [
                Case("low", [], True),
                Case("within", "x", True),
                Case("high", ["x" * chars] * most, True),
                Case("below", "", False),
                Case("above", ["x"] * (most + 1), False, (str(most),)),
                Case("above", ["x" * (chars + 1)], False, (str(chars),)),
                *wrong(1, True, {}, [1], ["x", None]),
            ]
        case TokenIDs(most, least):
            short = [Case("below", [1] * (least - 1), False, (str(least),))] if least else []
            return [
                Case("low", [0] * least, True),
                Case("high", [1] * most, True),
                *short,
                Case("below", [-1], False, ("0",)),
                Case("above", [1] * (most + 1), False, (str(most),)),
                Case("above", [MAX_TOKEN_ID + 1], False, (str(MAX_TOKEN_ID),)),
                *wrong(1, "x", {}, ["1"], [True], [[1]]),
            ]
        case TokenBias(most, low, high):
            limits = (f"{low:g}", f"{high:g}")
            return [
                Case("low", {}, True),
                Case("low", {"0": low}, True),
                Case("high", {str(i): high for i in range(most)}, True),
                Case("below", {"1": math.nextafter(low, -math.inf)}, False, limits),
                Case("above", {"1": math.nextafter(high, math.inf)}, False, limits),
                Case("above", {str(i): 0 for i in range(most + 1)}, False, (str(most),)),
                Case("below", {"-1": 0}, False),
                Case("above", {str(MAX_TOKEN_ID + 1): 0}, False),
                *wrong(1, "x", [], {"x": 1}, {"1": "1"}, {"1": None}),
            ]
        case JSONObject(depth):
            return [
                Case("low", {}, True),
                Case("high", nested(depth), True),
                Case("above", nested(depth + 1), False, (str(depth),)),
                *wrong(1, "x", [], True),
            ]
        case Object(fields):
            inner = [
                Case(case.kind, {f.name: case.value}, case.taken, case.limits)
                for f in fields
                for case in cases(f)
            ]
            return [Case("low", {}, True), *inner, Case("above", {"odd": 1}, False), *wrong(1, "x", [], True)]
        case Only(values):
            return [*(Case("within", value, True) for value in values), *wrong("odd", 12345, {"odd": 1})]
        case OneOf(values):
            return [*(Case("within", value, True) for value in values), *wrong("odd", 1, True, [], {})]
        case Refused():
            return wrong(1, "x", [], {}, True)
        case Harmless():
            return [Case("within", value, True) for value in (1, "x", [], {}, True)]
        case Custom(_, words) if words in TRANSLATED:
            taken, refused = TRANSLATED[words]
            return [*(Case("within", value, True) for value in taken), *wrong(*refused)]
        case Custom():
            return CUSTOM[field.name]
    raise AssertionError(f"{field.name}: no cases for {field.type}")


def wrong(*values: Any) -> list[Case]:
    """Values of other types."""
    return [Case("type", value, False) for value in values]
