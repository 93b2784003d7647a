"""Chats as clients and libraries send them back: what else is on their messages, nulls, unknown fields."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from servelite.frontend.errors import APIError
from servelite.frontend.fields import object_schema
from servelite.frontend.openapi import openapi_page
from servelite.frontend.protocol import CHAT_FIELDS, BodyRules, read_chat
from servelite.frontend.tools import NO_TOOLS

FITS = jsonschema.Draft202012Validator(object_schema(CHAT_FIELDS)).is_valid
CACHED: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
SIGNED = {"google": {"thought_signature": "x"}}
DETAILS = [{"type": "reasoning.text", "text": "Hm.", "format": "unknown", "index": 0}]
THINKING = [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]
CITED = [
    {"type": "url_citation", "url_citation": {"start_index": 0, "end_index": 1, "title": "t", "url": "u"}}
]
HI: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "9"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "strict": True, "parameters": {"type": "object"}},
}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": list(messages) or [HI]} | fields


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text} | more


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return read_chat(one) == read_chat(other)


@pytest.mark.parametrize(
    ("sent", "plain"),
    [
        ([HI | CACHED, HI], [HI, HI]),
        ([HI | {"content": [part("hi", **CACHED)]}], [HI]),
        ([HI | {"content": [part("hi", prompt_cache_breakpoint={"mode": "explicit"})]}], [HI]),
        ([HI | {"content": [part("a"), part("b", cache_control=None)]}], [HI | {"content": "a\nb"}]),
        ([HI | {"content": []}], [HI | {"content": ""}]),
        *[
            ([{"role": role, "content": [part("x", **CACHED)]}, HI], [{"role": role, "content": "x"}, HI])
            for role in ("system", "developer", "user", "assistant")
        ],
        ([CALLED, RESULT | {"content": [part("9")]} | CACHED], [CALLED, RESULT]),
        ([CALLED | {"content": None}, RESULT], [CALLED, RESULT]),
        ([CALLED | {"content": [], "function_call": None, "images": [], "audio": None}], [CALLED]),
        ([CALLED | {"annotations": CITED, "refusal": "", "provider_specific_fields": {}}], [CALLED]),
        ([CALLED | {"type": "function", "function": {"name": "f", "arguments": "{}"}}], [CALLED]),
        (
            [
                {
                    "role": "assistant",
                    "content": [part("a", role="assistant", refusal=None), part("b", annotations=[])],
                }
            ],
            [{"role": "assistant", "content": "a\nb"}],
        ),
        ([CALLED | {"tool_calls": [CALL | {"index": 0, "extra_content": SIGNED}]}], [CALLED]),
        (
            [CALLED | {"tool_calls": [CALL | {"type": None, "provider_specific_fields": {"a": 1}}]}],
            [CALLED],
        ),
        (
            [CALLED | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": {"a": 1}}}]}],
            [CALLED],
        ),
        (
            [CALLED | {"reasoning": "Hm.", "reasoning_content": "Hm.", "reasoning_details": DETAILS}],
            [CALLED | {"reasoning_content": "Hm."}],
        ),
        (
            [CALLED | {"thinking_blocks": THINKING, "reasoning_items": None, "reasoning_content": "Hm."}],
            [CALLED | {"reasoning_content": "Hm."}],
        ),
        (
            [{"role": "assistant", "content": None, "refusal": "No."}],
            [{"role": "assistant", "content": "No."}],
        ),
        (
            [{"role": "assistant", "content": [part("a"), {"type": "refusal", "refusal": "No."}]}],
            [{"role": "assistant", "content": "a\nNo."}],
        ),
        (
            [
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "9"},
            ],
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "f", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "name": "f", "tool_call_id": "f", "content": "9"},
            ],
        ),
    ],
)
def test_what_comes_back(sent: list[Any], plain: list[Any]) -> None:
    assert same(chat(*sent), chat(*plain))
    assert FITS(chat(*sent)) and FITS(chat(*plain))


def test_notes_on_tools_do_not_reach_the_template() -> None:
    noted = TOOL | CACHED | {"function": TOOL["function"] | CACHED | {"strict": None}}
    bare = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    read = read_chat(chat(tools=[noted])).template.tools
    assert list(read) == [{"type": "function", "function": bare}] and FITS(chat(tools=[noted]))
    swapped = {"function": {"parameters": {}, "name": "g"}, "type": "function"}
    (read_swapped,) = read_chat(chat(tools=[swapped])).template.tools  # in the order that it came
    assert [*read_swapped, *read_swapped["function"]] == ["function", "type", "parameters", "name"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (HI | {"audio": {"id": "a"}}, ".audio"),
        (CALLED | {"images": [{"type": "image_url"}]}, ".images"),
        (HI | {"refusal": "No."}, ".refusal"),
        (HI | {"content": [{"type": "refusal", "refusal": "No."}]}, ".content[0].type"),
        (HI | {"content": [part("a", odd=1)]}, ".content[0].odd"),
        (HI | {"content": [{"type": "text", "text": None}]}, ".content[0].text"),
        (HI | {"odd": 0}, ".odd"),
        (CALLED | {"function_call": {"arguments": "{}"}, "tool_calls": []}, ".function_call.name"),
        (CALLED | {"tool_calls": [CALL | {"odd": 1}]}, ".tool_calls[0].odd"),
        (CALLED | {"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f"}}]}, ".tool_calls[0]"),
        ({"role": "function", "content": "9"}, ".name"),
        (RESULT | {"content": None}, ".content"),
    ],
)
def test_what_asks_for_something_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as caught:
        read_chat(chat(message))
    assert caught.value.param == f"messages[0]{param}" in caught.value.message


def allowed(*names: str, **more: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools} | more}


def test_allowed_tools_are_all_there_are() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    request = read_chat(chat(tools=tools, tool_choice=allowed("h", "f")))
    assert list(request.template.tools) == list(request.tools.tools) == [tools[0], tools[2]]
    assert request.tools.places == ("tools[0].function.parameters", "tools[2].function.parameters")
    assert request.tools.choice.mode == "required" and request.tools.forced
    assert read_chat(chat(tools=tools, tool_choice=allowed("g", mode="auto"))).tools.wanted
    for wrong, param in (
        (allowed("f", "x"), "tool_choice"),
        (allowed(), "tool_choice.allowed_tools.tools"),
        (allowed("f", mode="none"), "tool_choice.allowed_tools.mode"),
        (allowed("f", mode=None), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.mode"),
    ):
        with pytest.raises(APIError) as caught:
            read_chat(chat(tools=tools, tool_choice=wrong))
        assert caught.value.param == param


def test_another_kind_of_tool_is_named() -> None:
    for kind in ("custom", "web_search"):
        with pytest.raises(APIError) as caught:
            read_chat(chat(tools=[TOOL, {"type": kind, kind: {"name": "x"}}]))
        assert caught.value.param == "tools[1].type" and repr(kind) in caught.value.message


def test_a_hosted_tool_is_left_out_where_unknown_fields_are() -> None:
    told: list[str] = []
    body = chat(tools=[{"type": "web_search", "web_search": {}}, TOOL])
    use = read_chat(body, BodyRules(unknown=told.append)).tools
    assert (use.tools, use.places) == ((TOOL,), ("tools[1].function.parameters",))
    assert told == ["tools[0].type=web_search"]
    assert read_chat(chat(tools=body["tools"][:1]), BodyRules(unknown=told.append)).tools == NO_TOOLS


RICH: dict[str, Any] = chat(
    {"role": "system", "name": "s", "content": [part("x", **CACHED)]} | CACHED,
    HI | {"name": "bob"},
    CALLED
    | {"reasoning_content": "Hm.", "reasoning": "Hm.", "refusal": "No.", "name": "a", "annotations": CITED}
    | {"tool_calls": [CALL | {"index": 0} | CACHED]},
    RESULT | {"name": "f"},
    tools=[TOOL],
    tool_choice={"type": "function", "function": {"name": "f"}},
    stream=True,
    stream_options={"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False},
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "n", "description": "d", "strict": True, "schema": {"type": "object"}},
    },
    reasoning={"summary": "auto"},
    logprobs=True,
    top_logprobs=2,
    seed=1,
)
OF_CLIENTS = ("parameters", "schema")  # a JSON Schema: null is a value there


def objects(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a body there are objects of ours."""
    if isinstance(value, dict):
        yield at
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for name, inner in items:
        if name not in OF_CLIENTS and name not in ("cache_control", "annotations"):
            yield from objects(inner, (*at, name))


def changed(at: tuple[Any, ...], **fields: Any) -> dict[str, Any]:
    """RICH with other fields at one place; `...`: without it."""
    body = copy.deepcopy(RICH)
    place: Any = body
    for name in at:
        place = place[name]
    place |= fields
    for name, value in fields.items():
        if value is ...:
            del place[name]
    return body


def test_null_is_absence_at_every_depth() -> None:
    tried = 0
    for at in objects(RICH):
        place: Any = RICH
        for name in at:
            place = place[name]
        for name in [*place, "surprise"]:
            null = changed(at, **{name: None})
            try:
                expected = read_chat(changed(at, **{name: ...}))
            except APIError as error:
                with pytest.raises(APIError) as caught:
                    read_chat(null)
                assert caught.value.param == error.param, (at, name)
                assert not FITS(null) or not at, (
                    at,
                    name,
                )  # of two fields that contradict each other no schema tells
                continue
            assert read_chat(null) == expected and FITS(null), (at, name)
            tried += 1
    assert tried > 40


def test_unknown_fields_are_told_of_at_every_depth() -> None:
    page = json.loads(openapi_page([], passes_unknown=True))
    opened = jsonschema.Draft202012Validator(page["components"]["schemas"]["v1_chat_completions"])
    for at in objects(RICH):
        path = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in (*at, "surprise"))[1:]
        body = changed(at, surprise=1)
        told: list[str] = []
        with pytest.raises(APIError) as caught:
            read_chat(body)
        assert (caught.value.param, caught.value.code) == (path, "unknown_field")
        assert path in caught.value.message and not FITS(body)
        assert read_chat(body, BodyRules(unknown=told.append)) == read_chat(RICH)
        assert told == [path] and opened.is_valid(body)
        with pytest.raises(APIError):  # the next body is read by its own rules
            read_chat(body)


def test_arguments_are_an_object_however_their_type_says_so() -> None:
    def declared(**schema: Any) -> dict[str, Any]:
        return chat(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])

    plain = declared(type="object", properties={"a": {"default": None}})
    for kind in (["object"], ["object", "null"], ["null", "object"]):
        assert same(declared(type=kind, properties={"a": {"default": None}}, required=None), plain)
    assert same(declared(type=None, properties={"a": {}}), declared(properties={"a": {}}))
    for wrong in ("array", ["null"], ["object", "string"], []):
        with pytest.raises(APIError, match="arguments are an object"):
            read_chat(declared(type=wrong))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r'{"a": "\ud83d\ude00"}', "\N{GRINNING FACE}"),
        (r'{"a": "x\ud800"}', "x?"),
        (r'{"a": "\udc00 \u00e9"}', "? \u00e9"),
        (r'{"a": "\\ud800"}', r"\ud800"),
    ],
)
def test_what_a_model_wrote_that_has_no_utf8_may_come_back(written: str, read: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": written}}
    (message,) = read_chat(chat({"role": "assistant", "tool_calls": [call]})).messages
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": read}


def test_a_named_function_is_called_once() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert not read_chat(chat(tools=[TOOL], tool_choice=named)).tools.parallel
    assert read_chat(chat(tools=[TOOL], tool_choice="required")).tools.parallel
