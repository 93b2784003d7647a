"""Tools and reasoning over HTTP: scripted answers, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http.server import Server, running_server

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function %}
<tool_call>{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif thinking_opened %}<think>
{% endif %}{% endif %}"""

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Münster 東京 😀"]},
        "days": {"type": "integer"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "ping"}},
]
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Münster 東京 😀", "days": 3}}\n</tool_call>'
)
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
SCRIPT = {
    "Weather?": f"Let me look.\n\n{CALL}\n{PING}",
    "Only a call.": CALL,
    "Think.": f"<think>\nThe user wants …\n</think>\n\n{CALL}",
    "Inside.": "Hm. So.\n</think>\n\nThe answer.",
    "Not a call.": "Write <tool_call> and then </tool_call>, as {x}.",
    "Plain.": "Just text.",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "template.jinja").write_text(TEMPLATE)
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps({"prompt": k, "text": v}) + "\n" for k, v in SCRIPT.items()))
    flags = ("--executor", "simulated", "--simulated-step-ms", "1", "--simulated-script", str(script))
    with running_server(folder, *flags, "--chat-template", str(folder / "template.jinja")) as running:
        yield running


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **fields}


def whole(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def events(server: Server, body: dict[str, Any]) -> list[Any]:
    connection = server.connect()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]
    finally:
        connection.close()


def added_up(streamed: list[Any], index: int = 0) -> dict[str, Any]:
    """The choice that a stream's chunks add up to; checks the shape of each."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    reason, logprobs = None, []
    for event in streamed:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            assert set(delta) <= {"role", "content", "reasoning_content", "tool_calls"}
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for part in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    assert set(part) == {"index", "id", "type", "function"} and part["type"] == "function"
                    assert part["function"]["arguments"] == "" and part["function"]["name"]
                    calls.append({key: part[key] for key in ("id", "type", "function")})
                else:
                    assert part["index"] == len(calls) - 1 and set(part) == {"index", "function"}
                    assert set(part["function"]) == {"arguments"} and part["function"]["arguments"]
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
            if choice.get("logprobs"):
                logprobs += choice["logprobs"]["content"]
            reason = choice["finish_reason"] or reason
    return {"message": message, "finish_reason": reason, "logprobs": logprobs}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{key: call[key] for key in ("type", "function")} for call in message.get("tool_calls", [])]
    return message | ({"tool_calls": calls} if calls else {}) | {"content": message["content"] or None}


def both(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer's choice, after the stream was found to be the same."""
    answer = whole(server, body)
    streamed = events(server, body | {"stream_options": {"include_usage": True}})
    for choice in answer["choices"]:
        found = added_up(streamed, choice["index"])
        assert without_ids(found["message"]) == without_ids(choice["message"])
        assert found["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"]:
            assert found["logprobs"] == choice["logprobs"]["content"]
    for name in ("prompt_tokens", "completion_tokens"):  # the second finds the prompt cached
        assert streamed[-1]["usage"][name] == answer["usage"][name]
    choice = answer["choices"][0]
    ids = [call["id"] for call in choice["message"].get("tool_calls", [])]
    assert len(set(ids)) == len(ids) and all(call_id.startswith("call_") for call_id in ids)
    return choice


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


EXPECTED = ("get_weather", {"city": "Münster 東京 😀", "days": 3})


def test_calls(server: Server) -> None:
    choice = both(server, ask("Weather?", tools=TOOLS))
    assert calls_of(choice) == [EXPECTED, ("ping", {})]
    assert choice["message"]["content"] == "Let me look." and choice["finish_reason"] == "tool_calls"
    assert "東京 😀" in choice["message"]["tool_calls"][0]["function"]["arguments"]
    choice = both(server, ask("Only a call.", tools=TOOLS, tool_choice="auto"))
    assert choice["message"]["content"] is None and "reasoning_content" not in choice["message"]


def test_one_call_only(server: Server) -> None:
    choice = both(server, ask("Weather?", tools=TOOLS, parallel_tool_calls=False))
    assert calls_of(choice) == [EXPECTED] and choice["finish_reason"] == "tool_calls"


def test_without_tools_a_call_is_text(server: Server) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = both(server, ask("Only a call.", **fields))
        assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
        assert choice["finish_reason"] == "stop"


def test_text_is_content(server: Server) -> None:
    for question in ("Not a call.", "Plain."):
        choice = both(server, ask(question, tools=TOOLS))
        assert choice["message"] == {"role": "assistant", "content": SCRIPT[question], "refusal": None}
        assert choice["finish_reason"] == "stop"


def test_reasoning(server: Server) -> None:
    choice = both(server, ask("Think.", tools=TOOLS))
    assert choice["message"]["reasoning_content"] == "The user wants …"
    assert calls_of(choice) == [EXPECTED] and choice["message"]["content"] is None
    choice = both(server, ask("Think.", tools=TOOLS, include_reasoning=False))
    assert "reasoning_content" not in choice["message"] and calls_of(choice) == [EXPECTED]


def test_reasoning_that_the_prompt_opens(server: Server) -> None:
    choice = both(server, ask("Inside.", chat_template_kwargs={"thinking_opened": True}))
    assert choice["message"]["reasoning_content"] == "Hm. So."
    assert choice["message"]["content"] == "The answer."
    choice = both(server, ask("Plain.", reasoning_effort="none"))
    assert choice["message"] == {"role": "assistant", "content": "Just text.", "refusal": None}


def test_several_choices_and_logprobs(server: Server) -> None:
    body = ask("Weather?", tools=TOOLS, n=2)
    answer = whole(server, body)
    assert [calls_of(choice) for choice in answer["choices"]] == [[EXPECTED, ("ping", {})]] * 2
    both(server, body)
    plain = whole(server, ask("Weather?"))
    assert answer["usage"]["completion_tokens"] == 2 * plain["usage"]["completion_tokens"]


def test_a_call_that_is_cut_off(server: Server) -> None:
    usage = whole(server, ask("Only a call."))["usage"]
    for tokens in range(1, usage["completion_tokens"], 7):
        choice = both(server, ask("Only a call.", tools=TOOLS, max_tokens=tokens))
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", []):
            assert '{"city": "Münster 東京 😀", "days": 3}'.startswith(
                call["function"]["arguments"].rstrip("\ufffd")  # half a character
            )


def test_a_stop_string_in_a_call(server: Server) -> None:
    choice = both(server, ask("Weather?", tools=TOOLS, stop=['"days"']))
    assert choice["message"]["content"] == "Let me look." and choice["finish_reason"] == "stop"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Münster 東京 😀", '
    choice = both(server, ask("Weather?", tools=TOOLS, stop=["</tool_call>"]))
    assert calls_of(choice) == [EXPECTED] and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
    ],
)
def test_contradictions_are_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        status, body = server.post("/v1/chat/completions", ask("Plain.", stream=stream, **fields))
        assert (status, body["error"]["param"]) == (400, param)


def test_the_template_gets_tools_and_calls(server: Server) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 3, "b": "é"}'},
    }
    prompts = set()
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        messages = [
            {"role": "user", "content": "A"},
            {"role": "assistant", **content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "21"},
            {"role": "user", "content": "B"},
        ]
        body = {"model": "demo", "messages": messages, "tools": TOOLS}
        status, tokens = server.post("/tokenize", body)
        assert status == 200, tokens
        prompts.add(server.post("/detokenize", {"tokens": tokens["tokens"]})[1]["prompt"])
        assert server.post("/v1/chat/completions", body | {"max_tokens": 1})[0] == 200
    (prompt,) = prompts
    assert '<tool_call>{"name": "add", "arguments": {"a": 3, "b": "é"}}</tool_call>' in prompt
    assert json.dumps(TOOLS[0], ensure_ascii=False) in prompt and "None" not in prompt
    assert "<|im_start|>tool\n21<|im_end|>" in prompt


def test_the_openai_sdk(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    tools = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS[:1]]
    messages: Any = [{"role": "user", "content": "Weather?"}]
    parsed = client.chat.completions.parse(model="demo", messages=messages, tools=tools)  # type: ignore[arg-type]
    called = parsed.choices[0].message.tool_calls
    assert called is not None and called[0].function.parsed_arguments == EXPECTED[1]
    done = []
    with client.chat.completions.stream(model="demo", messages=messages, tools=tools) as stream:  # type: ignore[arg-type]
        for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.name, event.parsed_arguments))
        final = stream.get_final_completion()
    assert done[0] == EXPECTED
    assert (
        final.choices[0].finish_reason == "tool_calls" and final.choices[0].message.content == "Let me look."
    )


ODD = 'Münster 東京 😀 "q" \\'
GO = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": [ODD]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORCED = [
    {"type": "function", "function": {"name": "go", "parameters": GO, "strict": True}},
    {"type": "function", "function": {"name": "ping"}},
]


def test_a_call_that_is_asked_for_comes(server: Server) -> None:
    body = ask("Anything.", seed=3, max_tokens=1000, tools=FORCED)
    named = {"type": "function", "function": {"name": "go"}}
    choice = both(server, body | {"tool_choice": named, "parallel_tool_calls": False})
    assert calls_of(choice) == [("go", {"city": ODD})] and choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert "東京 😀" in call["function"]["arguments"] and "\\u" not in call["function"]["arguments"]
    for seed in range(2):
        choice = both(
            server,
            body
            | {"tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
            | {"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert calls_of(choice) in ([("go", {"city": ODD})], [("ping", {})])


def test_a_schema_that_cannot_be_enforced_is_named(server: Server) -> None:
    for schema, word in (
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"type": "hiccup"}}}, "parameters"),
        ({"type": "object", "properties": {"a": {"enum": 5}}}, "parameters"),
        ({"type": "object", "properties": {}, "required": "a"}, "parameters"),
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
        status, body = server.post(
            "/v1/chat/completions", ask("Plain.", tools=tools, tool_choice="required", max_tokens=9)
        )
        assert (status, body["error"]["param"]) == (400, "tools[0].function.parameters")
        assert word in body["error"]["message"]


def test_structured_output_begins_where_reasoning_ends(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": schema | {"additionalProperties": False}},
    }
    body = ask("Anything.", seed=1, max_tokens=100, response_format=form)
    for thinking in (False, None):
        kwargs = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
        choice = both(server, body | kwargs)
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"])["a"] in (1, 2)


def test_a_call_or_an_answer_of_a_form(server: Server) -> None:
    """Under `auto` both are possible; what a scripted model wants to say is one of the two."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": GO}}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}, "response_format": form, "max_tokens": 100}
    choice = both(server, ask("Only a call.", tools=TOOLS, seed=1, **kwargs))
    if choice["finish_reason"] == "tool_calls":
        assert calls_of(choice)
    elif choice["finish_reason"] == "stop":
        assert json.loads(choice["message"]["content"]) == {"city": ODD}
    choice = both(server, ask("Anything.", tools=FORCED, tool_choice="required", seed=1, **kwargs))
    assert choice["message"]["content"] in (None, "")
    status, body = server.post(
        "/v1/chat/completions",
        ask("Plain.", tools=TOOLS, tool_choice="required", structured_outputs={"regex": "a"}),
    )
    assert (status, body["error"]["param"]) == (400, "tool_choice")
