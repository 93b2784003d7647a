"""Structured output: text that a schema forces, bad constraints, schemas made to hurt."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.conformance.target import CHAT, GREEDY, Target, a_long_stream, together

ASK = {"messages": [{"role": "user", "content": "x"}]}
CHARACTERS = "😀 👩\u200d👩\u200d👧 e\u0301 漢字 🇯🇵 नमस्ते"


def formed(schema: Any, name: str = "s", **more: Any) -> dict[str, Any]:
    """A request for an answer of this schema."""
    form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema} | more}
    return ASK | {"response_format": form}


FORCED = (
    formed(
        {
            "type": "object",
            "properties": {"s": {"type": "string", "enum": [CHARACTERS]}},
            "required": ["s"],
            "additionalProperties": False,
        },
        strict=True,
    )
    | {"max_tokens": 220}
    | GREEDY
)


def _whole_characters(target: Target) -> None:
    target.needs("response_format")
    plain = target.plain(CHAT, FORCED)
    assert plain.finish_reason == "stop" and json.loads(plain.text)["s"] == CHARACTERS

    def deltas() -> list[str]:
        events = target.events(CHAT, FORCED)
        choices = [choice for chunk in events.chunks for choice in chunk["choices"]]
        return [choice["delta"].get("content") or "" for choice in choices]

    for parts in together([deltas] * 16):
        assert "".join(parts) == plain.text
        assert not any("\ufffd" in part for part in parts)
        for part in parts:
            part.encode("utf-8")  # which a lone surrogate has not


def test_dtk_01_characters_of_several_tokens_arrive_whole(target: Target) -> None:
    """DTK-01, byte-level BPE."""
    _whole_characters(target)


@pytest.mark.slow
def test_dtk_01_with_byte_fallback(gemma: Target) -> None:
    """DTK-01, SentencePiece with byte fallback, under a chat template."""
    _whole_characters(gemma)


BAD_SCHEMAS: list[Any] = [
    {"properties": {"foo": "bar"}},
    {"type": "hiccup"},
    {"type": 123},
    {"$ref": "#/$defs/none"},
    {"type": "string", "pattern": "([a-z"},
    {"enum": []},
    {"type": "object", "required": "a"},
]


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=json.dumps)
def test_str_01_a_bad_schema_is_a_400(target: Target, schema: Any) -> None:
    """STR-01, bad: while a stream runs, which notices nothing."""
    with a_long_stream(target):
        error = target.refused(CHAT, formed(schema) | {"max_tokens": 8} | GREEDY, seconds=10)
    assert "response_format" in error["message"] or (error["param"] or "").startswith("response_format")
    target.check_alive()


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "schema": {"type": "object"}},
        {"type": "sound"},
        {"type": "json_schema"},
        {},
        "json",
    ],
    ids=json.dumps,
)
def test_str_01_a_bad_form_is_a_400(target: Target, form: Any) -> None:
    """STR-01, nofield and type."""
    error = target.refused(CHAT, ASK | {"response_format": form} | GREEDY)
    assert "response_format" in error["message"]


def test_str_01_a_schema_without_a_name(target: Target) -> None:
    """STR-01, noname: OpenAI refuses it; no crash in any case."""
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    reply = target.post(CHAT, ASK | {"response_format": form, "max_tokens": 8} | GREEDY)
    assert reply.status_code in (200, 400)
    target.check_alive()


@pytest.mark.parametrize("constraint", [{"regex": "(unclosed"}, {"grammar": "root ::= "}], ids=json.dumps)
def test_str_01_a_bad_expression_is_a_400(target: Target, constraint: dict[str, str]) -> None:
    """STR-01, regex: vLLM's extension."""
    target.needs("structured_outputs")
    error = target.refused(CHAT, ASK | {"structured_outputs": constraint, "max_tokens": 8} | GREEDY)
    assert "structured_outputs" in error["message"] or "structured_outputs" in error["param"]
    target.check_alive()


LIST = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {
            "type": "object",
            "properties": {
                "v": {"type": "boolean"},
                "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
}


def _is_a_list(value: Any) -> bool:
    while value is not None:
        if set(value) != {"v", "next"} or not isinstance(value["v"], bool):
            return False
        value = value["next"]
    return True


def _begins_a_list(text: str) -> bool:
    """Whether more text could make it one; spaces within it do not count."""
    rest = "".join(text.split())
    nodes = ['{"v":true,"next":', '{"v":false,"next":']
    while node := next((node for node in nodes if rest.startswith(node)), ""):
        rest = rest.removeprefix(node)
    return any(whole.startswith(rest) for whole in (*nodes, "null" + "}" * text.count("{")))


def test_str_04_a_recursive_schema(target: Target) -> None:
    """STR-04, list."""
    target.needs("response_format")
    finished = 0
    for seed in range(8):
        answer = target.both(CHAT, formed(LIST) | {"temperature": 1, "max_tokens": 60, "seed": seed})
        if answer.finish_reason == "stop":
            finished += 1
            assert _is_a_list(json.loads(answer.text))
        else:
            assert _begins_a_list(answer.text), answer.text
    assert finished
    assert not any(map(_begins_a_list, ('{"v":1', '{"v":true,"next":{}', '{"next"', "[")))


def _deep(levels: int) -> bytes:
    opening = b'{"type":"object","properties":{"a":'
    return opening * levels + b'{"type":"null"}' + b"}}" * levels


HURTFUL: dict[str, bytes] = {
    "self": b'{"$ref":"#"}',
    "deep": _deep(5000),
    "paren": json.dumps({"type": "string", "pattern": "(" * 20_000 + ")" * 20_000}).encode(),
    "wide": json.dumps(
        {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(5000)}}
    ).encode(),
    "enum": json.dumps({"enum": [f"value {number}" for number in range(20_000)]}).encode(),
    "items": json.dumps({"type": "array", "minItems": 1_000_000, "maxItems": 1_000_000}).encode(),
    "repeat": json.dumps({"type": "string", "pattern": "(a{1,1000}){1,1000}"}).encode(),
}


@pytest.mark.parametrize("name", HURTFUL)
def test_str_04_schemas_made_to_hurt(target: Target, name: str) -> None:
    """STR-04. A 400, or an answer; nobody else waits for it, and memory does not grow without end."""
    form = b'{"type":"json_schema","json_schema":{"name":"s","schema":%s}}' % HURTFUL[name]
    head = json.dumps({"model": target.model, "max_tokens": 16} | ASK).encode()
    before = target.resident()
    with a_long_stream(target):
        begun = time.monotonic()
        reply = target.post(CHAT, head[:-1] + b', "response_format": ' + form + b"}")
        assert time.monotonic() - begun < 30
    assert reply.status_code in (200, 400), reply.text[:300]
    assert target.resident() - before < 1 << 30
    target.check_alive()
