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
ANSWERS = {
    "Say hello.": "Hello to you.",
    "Say hello in exactly 3 words.": "Hello to you.",
    "Reply with just the name.": "Alice",
    "Count from 1 to 5.": "1 2 3 4 5",
    "Say one word.": "Word",
    "Repeat only the number.": "four",
    "test": "Yes.",
    "Show your reasoning.": "15 * 37 is 555.",
    "as JSON": '{"count": 3}',
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
        parsed = client.responses.parse(model="demo", input="Count, as JSON", text_format=Count)
        assert parsed.output_parsed == Count(count=3)


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
        turns = [
            *asked,
            call.model_dump(include={"type", "call_id", "name", "arguments", "id", "status"}),
            output,
        ]
        answer = client.responses.create(model="demo", input=turns, tools=[tool])
        assert answer.output_text == "Hello to you."


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
