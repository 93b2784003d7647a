"""Tools of `/v1/responses` and their calls: functions, custom tools, namespaces; what Codex sends."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from servelite.frontend import shapes
from servelite.frontend.answer_shapes import ROUTES
from servelite.frontend.errors import APIError
from servelite.frontend.forced_calls import functions_of
from servelite.frontend.protocol import PLAIN_RULES, BodyRules
from servelite.frontend.responses.request import read_response
from servelite.frontend.tools import MAX_TOOLS
from tests.frontend.named_events import call, collected, delta, streamed
from tests.frontend.translated_fields import CALL, CUSTOM, FLAT, GRAMMAR, OUTPUT, SCHEMA, text

GROUP: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [
        {
            "type": "function",
            "name": "close",
            "description": "Ends one.",
            "strict": False,
            "parameters": SCHEMA,
        },
        {"type": "function", "name": "add", "parameters": SCHEMA},
    ],
}
WEB_SEARCH = {"type": "web_search", "external_web_access": False}
CODEX: dict[str, Any] = {
    "model": "demo",
    "instructions": "You are a coding agent. " * 200,
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [text("be careful", "input_text")],
        },
        {"type": "message", "id": "msg_2", "role": "user", "content": [text("list the files", "input_text")]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [text("I look", "reasoning_text")],
            "encrypted_content": None,
        },
        {"type": "function_call", "name": "shell", "arguments": '{"cmd": "ls"}', "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": [text("a.txt", "input_text")]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "d",
            "name": "patch",
            "input": '*** "x"',
        },
        {"type": "custom_tool_call_output", "call_id": "d", "output": "done"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "runs", "strict": False, "parameters": SCHEMA},
        GROUP,
        {"type": "custom", "name": "patch", "description": "patches", "format": {"type": "text"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "max", "summary": "detailed"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a22b88",
    "client_metadata": {"turn_id": "1"},
    "text": {"verbosity": "low"},
    "truncation": "auto",
    "top_logprobs": 0,
}


def asking(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": "hi", **fields}


def names(body: dict[str, Any], rules: BodyRules = PLAIN_RULES) -> list[str]:
    """Of the functions that the chat declares."""
    return [tool["function"]["name"] for tool in read_response(body, rules).chat.tools.tools]


def refused(body: dict[str, Any]) -> APIError:
    with pytest.raises(APIError) as caught:
        read_response(body, PLAIN_RULES)
    assert caught.value.status == 400
    return caught.value


def without_ids(response: dict[str, Any]) -> Any:
    items = [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]
    times = ("id", "created_at", "completed_at")
    return {name: value for name, value in response.items() if name not in times} | {"output": items}


def told(chunks: list[dict[str, Any]], *tools: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A stream's events, and the object at its end, which is also that of the whole answer."""
    events = streamed(read_response(asking(tools=list(tools), stream=True), PLAIN_RULES), chunks)
    whole = collected(read_response(asking(tools=list(tools)), PLAIN_RULES), chunks)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    jsonschema.validate(whole, shapes.told(ROUTES["/v1/responses"].whole))
    return events, events[-1]["response"]


def test_what_codex_sends() -> None:
    chat = read_response(CODEX, PLAIN_RULES).chat
    assert names(CODEX) == ["shell", "agents__close", "agents__add", "patch"]
    assert chat.template.kwargs == {"verbosity": "low", "reasoning_effort": "max"}
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "developer", "user", "assistant", "tool", "assistant", "tool"]
    looked, output, patched = chat.messages[3:6]
    assert (looked["reasoning_content"], output["content"]) == ("I look", "a.txt")
    assert patched["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": '*** "x"'}}


def test_a_hosted_tool_is_refused_by_name_or_left_out() -> None:
    body = CODEX | {"tools": [WEB_SEARCH, *CODEX["tools"]]}
    error = refused(body)
    assert (error.param, error.code) == ("tools[0].type", "unsupported_value")
    assert "'web_search'" in error.message and 'web_search = "disabled"' in error.message
    for kind in ("local_shell", "tool_search", "image_generation", "mcp"):
        assert repr(kind) in refused(asking(tools=[{"type": kind}])).message
    warned: list[str] = []
    translation = read_response(body, BodyRules(unknown=warned.append))
    assert warned == ["tools[0].type=web_search"]
    assert names(body, BodyRules(unknown=warned.append)) == names(CODEX)
    assert [tool["type"] for tool in collected(translation, [delta("stop")])["tools"]] == [
        "function",
        "namespace",
        "custom",
    ]


def test_a_namespaces_functions_are_the_models_under_its_name() -> None:
    chat = read_response(asking(tools=[FLAT, GROUP]), PLAIN_RULES).chat
    assert [tool["function"].get("description") for tool in chat.tools.tools] == [
        None,
        "Other agents.\n\nEnds one.",
        None,
    ]
    chunks = [
        delta(**call(0, "{}", "c", "agents__close")),
        delta(**call(1, "{}", "d", "add")),
        delta("tool_calls"),
    ]
    events, response = told(chunks, FLAT, GROUP)
    closed, added = response["output"]
    assert (closed["name"], closed["namespace"]) == ("close", "agents")
    assert added["name"] == "add" and "namespace" not in added
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done[0]["name"] == "close"
    sent = read_response(asking(input=["hi", closed, OUTPUT][1:], tools=[GROUP]), PLAIN_RULES).chat
    assert sent.messages[0]["tool_calls"][0]["function"]["name"] == "agents__close"


def test_a_custom_tools_calls_in_a_stream() -> None:
    pieces = ['{"inp', 'ut": "a\\n', "\\u00e9", "\\ud83d", "\\ude00", '"}']
    chunks = [
        delta(content="I patch"),
        delta(**call(0, "", "c", "patch")),
        *[delta(**call(0, piece)) for piece in pieces],
        delta(**call(1, '{"a": 1}', "d", "add")),
        delta("tool_calls"),
    ]
    events, response = told(chunks, CUSTOM, FLAT)
    message, custom, function = response["output"]
    assert custom | {"id": ""} == {
        "id": "",
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "c",
        "name": "patch",
        "input": "a\né\U0001f600",
    }
    assert (function["type"], message["content"][0]["text"]) == ("function_call", "I patch")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    of_it = [event for event in events if event.get("output_index") == 1]
    added, *deltas, done, item_done = of_it
    assert added["item"] == custom | {"status": "in_progress", "input": ""}
    assert {event["type"] for event in deltas} == {"response.custom_tool_call_input.delta"}
    assert [event["delta"] for event in deltas] == ["a\n", "é", "\U0001f600"]
    assert done["input"] == custom["input"]
    assert done["type"] == "response.custom_tool_call_input.done"
    assert {event["item_id"] for event in [*deltas, done]} == {custom["id"]}
    assert item_done["item"] == custom


@pytest.mark.parametrize(
    ("arguments", "text", "status"),
    [
        ('{"input": ""}', "", "completed"),
        (
            ' { "input" : "a\\"\\\\\\/\\u0041\\ud83d\\ude00\\udc00\\ud83dx\\ud83d\\u0041" } ',
            'a"\\/A\U0001f600??x?A',
            "completed",
        ),
        ('{"more": 1, "input": "a\\ud800"}', "a?", "completed"),
        ('{"input": "so f', "so f", "incomplete"),
        ('{"input": "so\\ud83d', "so", "incomplete"),
        ('{"input": "a", ', "a", "incomplete"),
        ('{"input": 1}', '{"input": 1}', "incomplete"),
    ],
)
def test_a_custom_tools_input_however_it_is_cut(arguments: str, text: str, status: str) -> None:
    for cut in range(len(arguments) + 1):
        pieces = [arguments[:cut], arguments[cut:]] if cut else list(arguments)
        chunks = [delta(**call(0, "", "c", "patch")), *[delta(**call(0, piece)) for piece in pieces]]
        events, response = told([*chunks, delta("stop")], CUSTOM)
        (item,) = response["output"]
        assert (item["input"], item["status"]) == (text, status)
        assert "".join(event["delta"] for event in events if event["type"].endswith("input.delta")) == text


@pytest.mark.parametrize("tool", [FLAT, CUSTOM])
@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("arguments", ['{"a', "[1]", "", '{"a": 1} }', "[" * 9999])
def test_a_malformed_call_is_incomplete(tool: dict[str, Any], reason: str, arguments: str) -> None:
    chunks = [delta(**call(0, arguments, "c", tool["name"])), delta(reason)]
    events, response = told(chunks, tool)
    (item,) = response["output"]
    assert (item["status"], item.get("arguments", item.get("input"))) == ("incomplete", arguments)
    cut = reason == "length"
    assert response["status"] == ("incomplete" if cut else "completed")
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    assert events[-2]["item"] == item


def test_a_call_that_is_complete_stays_so_whatever_is_cut_after_it() -> None:
    for more in ([], [delta(content="so I")]):
        _, response = told([delta(**call(0, "{}", "c", "add")), *more, delta("length")], FLAT)
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"][: 1 + len(more)]
        assert response["status"] == "incomplete"


def test_text_amid_calls_keeps_its_place() -> None:
    chunks = [
        delta(reasoning_content="hm"),
        delta(content="first"),
        delta(**call(0, "{}", "c", "add")),
        delta(content="between"),
        delta(**call(1, "{}", "d", "add")),
        delta(**call(2, '{"a', "e", "add")),
        delta(content="last"),
        delta("stop"),
    ]
    _, response = told(chunks, FLAT)
    kinds = [(item["type"], item["status"]) for item in response["output"]]
    assert kinds == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]


def test_a_grammar_of_a_custom_tool_is_refused_or_told() -> None:
    tool = CUSTOM | {"description": "patches", "format": GRAMMAR}
    error = refused(asking(tools=[tool]))
    assert (error.param, error.code) == ("tools[0].format.type", "unsupported_value")
    warned: list[str] = []
    chat = read_response(asking(tools=[tool]), BodyRules(unknown=warned.append)).chat
    assert warned == ["tools[0].format.type=grammar"]
    assert chat.tools.tools[0]["function"]["description"] == (
        "patches\n\nThe form of its input (lark):\nstart: /a+/"
    )


def test_allowed_tools() -> None:
    def allowed(*entries: tuple[str, str], mode: str = "auto") -> dict[str, Any]:
        listed = [{"type": kind, "name": name} for kind, name in entries]
        choice = {"type": "allowed_tools", "mode": mode, "tools": listed}
        return asking(tools=[FLAT, GROUP, CUSTOM], tool_choice=choice)

    body = allowed(("custom", "patch"), ("function", "close"), mode="required")
    assert names(body) == ["agents__close", "patch"]
    translation = read_response(body, PLAIN_RULES)
    assert translation.chat.tools.choice.mode == "required"
    answer = collected(translation, [delta("stop")])
    assert answer["tool_choice"] == body["tool_choice"] and len(answer["tools"]) == 3
    assert names(allowed(("namespace", "agents"))) == ["agents__close", "agents__add"]
    assert names(allowed()) == []
    assert refused(allowed(("function", "patch"))).param == "tool_choice.tools[0]"
    assert refused(allowed(("mcp", "patch"))).param == "tool_choice.tools[0].type"
    assert refused(allowed(mode="none")).param == "tool_choice.mode"
    assert refused(allowed(mode="required")).param == "tool_choice"


def test_the_choice_of_a_custom_tool_and_of_a_namespaces() -> None:
    for kind, name, meant in (("custom", "patch", "patch"), ("function", "close", "agents__close")):
        body = asking(tools=[FLAT, GROUP, CUSTOM], tool_choice={"type": kind, "name": name})
        use = read_response(body, PLAIN_RULES).chat.tools
        assert (use.choice.mode, use.choice.name, len(use.tools)) == ("named", meant, 4)


def test_a_choice_of_one_name_in_several_namespaces_is_exact() -> None:
    other = GROUP | {"name": "others"}

    def choosing(*tools: Any, **more: Any) -> dict[str, Any]:
        return asking(tools=list(tools), tool_choice={"type": "function", "name": "add"} | more)

    def chosen(*tools: Any, **more: Any) -> str:
        return read_response(choosing(*tools, **more), PLAIN_RULES).chat.tools.choice.name

    assert chosen(GROUP, FLAT) == chosen(GROUP, other, FLAT, namespace=None) == "add"
    assert chosen(GROUP, FLAT, namespace="agents") == chosen(GROUP) == "agents__add"
    assert "give its namespace" in refused(choosing(GROUP, other)).message
    assert chosen(GROUP, other, namespace="others") == "others__add"
    assert refused(choosing(GROUP, FLAT, namespace="nope")).param == "tool_choice"
    assert refused(choosing(GROUP, FLAT, namespace=1)).param == "tool_choice.namespace"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    assert names(asking(tools=[GROUP, FLAT], tool_choice=allowed)) == ["add"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([GROUP, GROUP], "tools[1].tools[0].name"),
        ([FLAT, CUSTOM | {"name": "add"}], "tools[1].name"),
        ([GROUP | {"tools": [GROUP]}], "tools[0].tools[0].type"),
        ([GROUP | {"name": "a b"}], "tools[0].name"),
        ([GROUP | {"tools": [FLAT | {"name": "a b"}]}], "tools[0].tools[0].name"),
        ([GROUP | {"tools": [FLAT | {"name": None}]}], "tools[0].tools[0].name"),
        ([GROUP | {"tools": {}}], "tools[0].tools"),
        ([GROUP | {"tools": [FLAT | {"name": f"f{i}"} for i in range(MAX_TOOLS)]}, FLAT], "tools"),
        ([FLAT | {"async": True}], "tools[0].async"),
        ([FLAT | {"allowed_callers": ["programmatic"]}], "tools[0].allowed_callers"),
    ],
)
def test_refusals_name_the_place_in_the_body(tools: list[Any], param: str) -> None:
    error = refused(asking(tools=tools))
    assert error.param == param and param in error.message


def test_a_schema_is_named_by_its_place_in_the_body() -> None:
    tools = [CUSTOM, GROUP | {"tools": [FLAT, FLAT | {"name": "f"}]}, FLAT | {"name": "last"}]
    use = read_response(asking(tools=tools, tool_choice="required"), PLAIN_RULES).chat.tools
    places = ("tools[0]", "tools[1].tools[0]", "tools[1].tools[1]", "tools[2]")
    assert [function.place for function in functions_of(use)] == [f"{place}.parameters" for place in places]


def test_text_after_calls_is_of_the_message_that_makes_them() -> None:
    said = [{"role": "assistant", "content": one} for one in ("before", "after", "later")]
    chat = read_response(asking(input=[said[0], CALL, said[1], OUTPUT, said[2]]), PLAIN_RULES).chat
    told = [(message["role"], message["content"], "tool_calls" in message) for message in chat.messages]
    assert told == [("assistant", "before\nafter", True), ("tool", "2", False), ("assistant", "later", False)]


def test_what_a_client_parsed_may_be_sent_back() -> None:
    said = {"type": "output_text", "text": '{"a": 1}', "annotations": [], "logprobs": [], "parsed": {"a": 1}}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [said]}
    called = CALL | {
        "parsed_arguments": {"a": 1},
        "caller": {"type": "direct"},
        "namespace": None,
        "async_": None,
    }
    output = OUTPUT | {"caller": {"type": "direct"}, "name": "add"}
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [text("hm")]}
    chats = [
        read_response(asking(input=items), PLAIN_RULES).chat
        for items in (
            [thought, message, called, output],
            [
                thought | {"content": [text("hm", "reasoning_text")]},
                {"role": "assistant", "content": json.dumps({"a": 1})},
                CALL,
                OUTPUT,
            ],
        )
    ]
    assert chats[0] == chats[1] and chats[0].messages[0]["reasoning_content"] == "hm"
