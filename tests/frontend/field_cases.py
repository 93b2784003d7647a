"""For each declared field: values that are taken and values that are refused, made from its declaration."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    Only,
    String,
    Strings,
    TokenBias,
    TokenIDs,
)
from servelite.frontend.prompts import MAX_MESSAGES, MAX_PROMPTS

HI = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Case:
    """A value of a field; `limits`: what an error about it must name."""

    kind: str  # "low", "high", "within", "below", "above", "type"
    value: Any
    taken: bool
    limits: tuple[str, ...] = ()


CUSTOM: dict[str, list[Case]] = {
    "messages": [
        Case("low", HI, True),
        Case("high", HI * MAX_MESSAGES, True),
        Case("below", [], False),
        Case("above", HI * (MAX_MESSAGES + 1), False, (str(MAX_MESSAGES),)),
        *[Case("type", value, False) for value in ("hi", 1, {}, [1], [[]], [{}])],
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
        case Harmless():
            return [Case("within", value, True) for value in (1, "x", [], {}, True)]
        case Custom():
            return CUSTOM[field.name]
    raise AssertionError(f"{field.name}: no cases for {field.type}")


def wrong(*values: Any) -> list[Case]:
    """Values of other types."""
    return [Case("type", value, False) for value in values]


def nested(depth: int) -> dict[str, Any]:
    """An object in an object, `depth` in all."""
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value
