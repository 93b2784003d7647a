"""Tools and calls reach the prompt, whatever a chat template knows of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from servelite.frontend.errors import APIError
from servelite.frontend.prompts import Message, read_messages
from servelite.frontend.tool_prompt import ToolPrompt
from servelite.tokenizer.chat_template import ChatTemplate

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "A"},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"é": "x", "n": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "21"},
    {"role": "user", "content": "B"},
]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "x"}]}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
AS_JSON = PLAIN.replace(
    "{% endfor %}",
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }})"
    "{% endfor %}{% endfor %}{{ tools | tojson }}",
)
AS_TEXT = AS_JSON.replace("c.function.arguments | tojson", "'=' + c.function.arguments")
EITHER = AS_JSON.replace(
    "c.function.arguments | tojson",
    "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson",
)


def prompt(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], declare: bool = True
) -> str:
    template = ChatTemplate(source, bos_token="", eos_token="", special_tokens=())
    fitted = ToolPrompt(source, template.render, declare=declare).fit(
        read_messages("messages", messages), tools
    )
    return template.render(fitted, tools=tools or None).text


@pytest.mark.parametrize("source", [AS_JSON, EITHER])
def test_arguments_are_an_object_where_the_template_writes_json(source: str) -> None:
    text = prompt(source, ASKED, [ADD])
    assert '(add {"é": "x", "n": 1})' in text and "[tool]21" in text
    assert text.endswith(json.dumps([ADD]))


def test_arguments_are_text_where_the_template_wants_that() -> None:
    assert '(add ={"é": "x", "n": 1})' in prompt(AS_TEXT, ASKED, [ADD])


def test_a_template_without_tools_gets_them_as_messages() -> None:
    text = prompt(PLAIN, ASKED, [ADD])
    assert text.startswith("[system]") and json.dumps(ADD) in text
    assert '[assistant]<tool_call>\n{"name": "add", "arguments": {"é": "x", "n": 1}}\n</tool_call>' in text
    assert "[user]<tool_response>\n21\n</tool_response>[user]B" in text
    system = [{"role": "system", "content": "Be brief."}, *ASKED]
    assert prompt(PLAIN, system, [ADD]).startswith("[system]Be brief.\n\n")
    assert prompt(PLAIN, ASKED, []).startswith("[user]A")
    assert prompt(PLAIN, ASKED[:1], [ADD], declare=False) == "[user]A"


def test_what_a_model_wrote_badly_is_kept() -> None:
    for arguments in ('{"a": ', "[1]", "no"):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        (read,) = read_messages("m", [{"role": "assistant", "content": "x", "tool_calls": [call]}])
        assert read["tool_calls"][0]["function"]["arguments"] == arguments
        assert arguments in prompt(PLAIN, [{"role": "assistant", "content": "x", "tool_calls": [call]}], [])


def test_messages_of_every_role() -> None:
    """An answer of ours goes back as it came."""
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
        ],
    }
    read: list[Message] = read_messages("messages", [message, RESULT])
    assert read == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}, "id": "c1"}],
        },
        {"role": "tool", "content": "x", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "m[0].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "m[0].tool_call_id"),
        ({"role": "tool", "tool_call_id": "c"}, "m[0].content"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "m[0].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "m[0].tool_calls"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "m[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "m[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "m[0].tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]},
            "m[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]},
            "m[0].tool_calls[0]",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "odd": 1}]},
            "m[0].tool_calls[0].odd",
        ),
        ({"role": "assistant", "content": "x", "reasoning_content": 1}, "m[0].reasoning_content"),
    ],
)
def test_a_bad_message_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as caught:
        read_messages("m", [message])
    assert caught.value.param == param and param in caught.value.message
