"""`/v1/responses` and `/v1/messages` on a running server: the SDKs, unmodified, and a compliance suite."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.http.server import Server, running_server

WEATHER = "What is the weather in San Francisco?"
PATCH = '*** "a"\n+b'
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ANSWERS = {
    "Add twice.": f"First {ADD} then {ADD} and that is all.",
    "Say hello.": "Hello to you.",
    "Say hello in exactly 3 words.": "Hello to you.",
    "Reply with just the name.": "Alice",
    "Count from 1 to 5.": "1 2 3 4 5",
    "Say one word.": "Word",
    "Repeat only the number.": "four",
    "test": "Yes.",
    "Show your reasoning.": "15 * 37 is 555.",
    "as JSON": '{"count": 3}',
    "Patch it.": f'<tool_call>{{"name": "patch", "arguments": {json.dumps({"input": PATCH})}}}</tool_call>',
    WEATHER: '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco"}}\n</tool_call>',
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"location": {"type": "string"}},
    "required": ["location"],
    "additionalProperties": False,
}


class Count(pydantic.BaseModel):
    """What an answer of a given form is read into."""

    count: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("other")
    lines = [json.dumps({"prompt": prompt, "text": text}) for prompt, text in ANSWERS.items()]
    (script := folder / "script.jsonl").write_text("\n".join(lines))
    flags = ("--executor", "simulated", "--simulated-step-ms", "2", "--simulated-script", str(script))
    names = ("--served-model-name", "demo", "gpt-5", "claude-4")
    with running_server(folder, *flags, *names, "--tool-call-parser", "hermes") as running:
        yield running


def test_openai_responses(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(model="demo", input="Say hello.", instructions="Be kind.")
        assert (answer.output_text, answer.status) == ("Hello to you.", "completed")
        with client.responses.stream(
            model="demo", input=[{"role": "user", "content": "Say hello."}]
        ) as stream:
            types = [event.type for event in stream]
            final = stream.get_final_response()
        assert final.output_text == "Hello to you."
        assert types[0] == "response.created" and types[-1] == "response.completed"
        deltas = types.count("response.output_text.delta")  # tokens of one step, or more on a busy machine
        assert final.usage is not None and 0 < deltas < final.usage.output_tokens
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(model="demo", input="x", previous_response_id=answer.id)
        with pytest.raises(openai.BadRequestError, match="include: this engine gives no log"):
            client.responses.create(model="demo", input="x", include=["message.output_text.logprobs"])
        parsed = client.responses.parse(model="demo", input="Count, as JSON", text_format=Count)
        assert parsed.output_parsed == Count(count=3)
        turns: Any = [
            *[item.model_dump() for item in parsed.output],
            {"role": "user", "content": "Say hello."},
        ]
        assert client.responses.create(model="demo", input=turns).output_text == "Hello to you."


def test_openai_responses_with_a_tool(server: Server) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    asked: list[Any] = [{"role": "user", "content": WEATHER}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.stream(model="demo", input=asked, tools=[tool]) as stream:
            final = stream.get_final_response()
        (call,) = final.output
        assert call.type == "function_call" and call.name == "get_weather"
        assert call.parsed_arguments == {"location": "San Francisco"}
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees. Say hello."}
        turns: Any = [*asked, call.model_dump(), output]
        answer = client.responses.parse(model="demo", input=turns, tools=[tool])
        assert answer.output_text == "Hello to you."


@pytest.mark.parametrize("length", [None, 9, 25, 45])
def test_a_stream_of_openai_responses_ends_with_the_whole(server: Server, length: int | None) -> None:
    """Text before, between and after calls; cut amid them, too."""
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    asked = {"model": "demo", "input": "Add twice.", "tools": [tool], "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**asked, max_output_tokens=length).to_dict()  # type: ignore[call-overload]
        events = list(client.responses.create(**asked, max_output_tokens=length, stream=True))  # type: ignore[call-overload]
    streamed = events[-1].response.to_dict()
    for response in (whole, streamed):
        for name in ("id", "created_at", "completed_at"):
            del response[name]
        for item in response["output"]:
            del item["id"]
            item.pop("call_id", None)
    streamed["usage"]["input_tokens_details"] = whole["usage"]["input_tokens_details"]  # the prefix cache
    assert streamed == whole
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["message", "function_call", "message", "function_call", "message"][: len(kinds)]
    assert (len(kinds) == 5 and whole["status"] == "completed") or length


def test_openai_responses_with_a_custom_tool(server: Server) -> None:
    """Called of the model's own accord and forced, in a stream; then its output."""
    tools: list[Any] = [
        {
            "type": "namespace",
            "name": "more",
            "description": "x",
            "tools": [{"type": "function", "name": "f"}],
        },
        {"type": "custom", "name": "patch", "description": "changes files"},
    ]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.stream(model="demo", input="Patch it.", tools=tools) as stream:
            deltas = [event for event in stream if event.type == "response.custom_tool_call_input.delta"]
            (call,) = stream.get_final_response().output
        assert call.type == "custom_tool_call" and (call.name, call.input) == ("patch", PATCH)
        assert "".join(event.delta for event in deltas) == call.input
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done. Say hello."}
        turns: list[Any] = [{"role": "user", "content": "Patch it."}, call.model_dump(), output]
        assert client.responses.create(model="demo", input=turns, tools=tools).output_text == "Hello to you."
        forced: Any = {"type": "custom", "name": "patch"}
        cut = client.responses.create(
            model="demo", input="x", tools=tools, tool_choice=forced, max_output_tokens=30
        )
        assert (cut.status, cut.output[0].type) == ("incomplete", "custom_tool_call")
        assert cut.output[0].to_dict()["status"] == "incomplete"


def test_anthropic_messages(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    asked: list[Any] = [{"role": "user", "content": "Say hello."}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(model="demo", max_tokens=50, messages=asked)
        assert (answer.content[0].text, answer.stop_reason) == ("Hello to you.", "end_turn")
        counted = client.messages.count_tokens(model="demo", messages=asked).input_tokens
        usage = answer.usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
        with client.messages.stream(
            model="demo", max_tokens=50, messages=asked, stop_sequences=[" you"]
        ) as stream:
            assert "".join(stream.text_stream) == "Hello to"
            final = stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", " you")
        with pytest.raises(anthropic.BadRequestError, match="image"):
            image = {"type": "image", "source": {"type": "url", "url": "x"}}
            client.messages.create(
                model="demo", max_tokens=1, messages=[{"role": "user", "content": [image]}]
            )
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", max_tokens=1, messages=asked)


def test_anthropic_messages_with_a_tool(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "get_weather", "description": "now", "input_schema": PARAMETERS}
    asked: list[Any] = [{"role": "user", "content": WEATHER}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(model="demo", max_tokens=99, messages=asked, tools=[tool]) as stream:
            final = stream.get_final_message()
        (use,) = final.content
        assert (use.name, use.input, final.stop_reason) == (
            "get_weather",
            {"location": "San Francisco"},
            "tool_use",
        )
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "12 degrees. Say hello."}
        asked += [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
        answer = client.messages.create(model="demo", max_tokens=99, messages=asked, tools=[tool])
        assert answer.content[0].text == "Hello to you."


@pytest.mark.parametrize("length", [9, 12, 25, 45, 99])
def test_a_stream_of_anthropics_is_the_whole_message(server: Server, length: int) -> None:
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "add", "input_schema": {"type": "object"}}
    asked: dict[str, Any] = {"model": "demo", "max_tokens": length, "tools": [tool]}
    asked["messages"] = [{"role": "user", "content": "Add twice."}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    assert whole.stop_reason == final.stop_reason == ("tool_use" if length == 99 else "max_tokens")
    blocks = [[block.to_dict() for block in message.content] for message in (whole, final)]
    for block in blocks[0] + blocks[1]:
        block.pop("id", None)
        if block.get("input", {}).get("INVALID_JSON"):  # the SDK reads such a text as far as it goes
            assert length != 99 and block is blocks[0][-1]
            block["input"] = blocks[1][-1]["input"]
    assert blocks[0] == blocks[1]
    kinds = ["text", "tool_use", "text", "tool_use", "text"]
    assert [block["type"] for block in blocks[0]] == kinds[: len(blocks[0])]


def test_anthropic_as_its_beta_clients_ask(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, auth_token="none", max_retries=0) as client:
        answer = client.beta.messages.create(
            model="demo",
            max_tokens=50,
            betas=["context-management-2025-06-27", "mid-conversation-system-2026-04-07"],
            system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
            messages=[{"role": "user", "content": "Say hello."}, {"role": "system", "content": "Be brief."}],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            thinking={"type": "adaptive", "display": "omitted"},
            metadata={"user_id": "u"},
        )
        assert answer.content[0].text == "Hello to you." and answer._request_id
        with pytest.raises(anthropic.BadRequestError, match="web_search_20250305") as caught:
            client.messages.create(
                model="demo",
                max_tokens=1,
                messages=[{"role": "user", "content": "x"}],
                tools=[{"type": "web_search_20250305", "name": "web_search"}],
            )
        assert caught.value.request_id == caught.value.body["request_id"]


@pytest.mark.parametrize(
    ("form", "name", "image"),
    [
        ("open-responses", "gpt-5", "image-input"),
        ("anthropic", "claude-4", "anth-image-input"),
        ("openai-chat", "gpt-5", "chat-image-input"),
    ],
)
def test_llm_comply(server: Server, form: str, name: str, image: str) -> None:
    """Everything but an image, which no text model takes. By the model's name the suite tells whether it may
    ask for reasoning."""
    pytest.importorskip("llm_comply")
    program = "import sys; from llm_comply.cli import main; sys.exit(main())"
    flags = ["-k", "none", "-u", f"{server.url}/v1", "-m", name, "--format", form, "--json"]
    run = subprocess.run(
        [sys.executable, "-c", program, *flags], capture_output=True, text=True, timeout=120, check=False
    )
    results = json.loads(run.stdout)["results"]
    assert len(results) >= 9
    others = {one["id"]: one.get("errors") for one in results if one["status"] != "passed"}
    assert set(others) == {image}, others
