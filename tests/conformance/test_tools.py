"""Tools: contradictions refused, one call where one is asked for, arguments as they were meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.target import CHAT, GREEDY, TOOL, Target

ASK = {"messages": [{"role": "user", "content": "x"}]} | GREEDY
PING = {
    "type": "function",
    "function": {
        "name": "ping",
        "description": "d",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
BOTH = {
    "messages": [{"role": "user", "content": "call both of them"}],
    "tools": [TOOL, PING],
    "max_tokens": 200,
} | GREEDY
CITY = 'Münster 東京 😀 "q" \\'
GO = {
    "type": "function",
    "function": {
        "name": "go",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": [CITY]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        {"tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "a"}}},
        {"tools": [TOOL], "tool_choice": "sometimes"},
    ],
    ids=["unknown", "req_none", "req_empty", "named_none", "word"],
)
def test_tol_04_contradictions_are_refused(target: Target, fields: dict[str, Any]) -> None:
    """TOL-04, before anything is generated."""
    error = target.refused(CHAT, ASK | fields)
    assert "tool" in error["message"]
    target.check_alive()


def test_tol_04_no_tools(target: Target) -> None:
    """TOL-04, empty and null: the answer is that of a request without them."""
    usual = target.both(CHAT, ASK | {"max_tokens": 2}).text
    assert target.both(CHAT, ASK | {"max_tokens": 2, "tools": None, "tool_choice": None}).text == usual
    reply = target.post(CHAT, ASK | {"max_tokens": 2, "tools": []})
    assert reply.status_code == 400 or reply.json()["choices"][0]["message"]["content"] == usual


def test_tol_04_a_tool_given_twice(target: Target) -> None:
    """TOL-04, dup."""
    target.needs("tools")
    assert target.post(CHAT, ASK | {"tools": [TOOL, TOOL], "max_tokens": 2}).status_code in (200, 400)
    target.check_alive()


def test_tol_05_parallel_calls_and_one_only(scripted: Target) -> None:
    """TOL-05, off and on: the model writes two calls in one turn."""
    scripted.needs("tools")
    for fields in ({}, {"parallel_tool_calls": True}):
        answer = scripted.both(CHAT, BOTH | fields)
        calls = [(call.name, json.loads(call.arguments)) for call in answer.calls]
        assert calls == [("get_weather", {"city": "Oslo", "unit": "c"}), ("ping", {})]
        assert answer.finish_reason == "tool_calls" and len({call.id for call in answer.calls}) == 2
    answer = scripted.both(CHAT, BOTH | {"parallel_tool_calls": False})
    assert [call.name for call in answer.calls] == ["get_weather"]
    assert json.loads(answer.calls[0].arguments) == {"city": "Oslo", "unit": "c"}
    assert answer.finish_reason == "tool_calls"


def test_tol_05_a_forced_call_is_one(target: Target) -> None:
    """TOL-05, req_off: by grammar, on any model."""
    target.needs("tools")
    asked = ASK | {"tools": [TOOL, PING], "tool_choice": "required", "parallel_tool_calls": False}
    answer = target.both(CHAT, asked | {"max_tokens": 120})
    (call,) = answer.calls
    assert call.name in ("get_weather", "ping") and isinstance(json.loads(call.arguments), dict)


def test_tol_06_arguments_stay_literal(target: Target) -> None:
    """TOL-06. Neither escaped nor escaped twice, plain and stream."""
    target.needs("tools")
    answer = target.both(CHAT, ASK | {"tools": [GO], "tool_choice": "required", "max_tokens": 120})
    (call,) = answer.calls
    assert call.name == "go" and json.loads(call.arguments) == {"city": CITY}
    assert "\\u" not in call.arguments and "東京" in call.arguments
