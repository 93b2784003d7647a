"""Python clients' own helpers, unmodified, against a server whose answers are known."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.http.scripted import KEY, scripted_server
from tests.http.server import Server
from tests.tool_environment import python_with

LITELLM = ("litellm==1.110.2",)
HELLO = "Hello to you, Jürgen 🙂."
BOTH = "The weather in Oslo and Bergen?"


class Place(pydantic.BaseModel):
    """What an answer of a given form, and a call's arguments, are read into."""

    city: str
    days: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    with scripted_server(tmp_path_factory.mktemp("clients")) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def saying(text: str) -> Any:
    return {"model": "demo", "messages": [{"role": "user", "content": text}]}


def test_openai_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**saying("A place, as an object."), response_format=Place)
    assert answer.choices[0].message.parsed == Place(city="Oslo", days=3)
    tool = openai.pydantic_function_tool(Place, name="get_weather")
    called = client.chat.completions.parse(**saying(BOTH), tools=[tool]).choices[0].message.tool_calls
    assert called is not None
    found = [call.function.parsed_arguments for call in called]
    assert found == [Place(city="Oslo", days=2), Place(city="Bergen", days=2)]
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**saying("A place, as an object."), response_format=Place, max_tokens=3)


def test_openai_stream_of_an_object(client: openai.OpenAI) -> None:
    partial = []
    with client.chat.completions.stream(**saying("A place, as an object."), response_format=Place) as stream:
        for event in stream:
            if event.type == "content.delta":
                partial.append(event.parsed)
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Place(city="Oslo", days=3)
    assert len(partial) > 1 and partial[-1] == {"city": "Oslo", "days": 3}


def test_openai_stream_of_calls(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Place, name="get_weather")
    done, deltas = [], 0
    with client.chat.completions.stream(**saying(BOTH), tools=[tool]) as stream:
        for event in stream:
            deltas += event.type == "tool_calls.function.arguments.delta"
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.index, event.parsed_arguments))
        final = stream.get_final_completion()
    assert done == [(0, Place(city="Oslo", days=2)), (1, Place(city="Bergen", days=2))]
    assert final.choices[0].finish_reason == "tool_calls" and deltas > 2


def test_openai_responses_stream_of_an_object(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "input": "A place, as an object.", "text_format": Place}
    with client.responses.stream(**asked) as stream:  # type: ignore[arg-type]
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_parsed == Place(city="Oslo", days=3)
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    assert client.responses.parse(**asked).output_parsed == final.output_parsed  # type: ignore[arg-type]


def test_openai_responses_parse_of_calls(client: openai.OpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(Place, name="get_weather")["function"] | {"type": "function"}
    answer = client.responses.parse(model="demo", input=BOTH, tools=[tool])
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Oslo", "Bergen"]


def test_anthropic_objects_and_tools_run_to_the_end(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic")

    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """The weather of some days."""
        called.append((city, days))
        return f"{city}: {'12' if city == 'Oslo' else '9'} degrees"

    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        asked = saying("A place, as an object.") | {"max_tokens": 99, "output_format": Place}
        assert client.messages.parse(**asked).parsed_output == Place(city="Oslo", days=3)
        with client.messages.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            assert stream.get_final_message().parsed_output == Place(city="Oslo", days=3)
        assert {"text", "content_block_stop", "message_stop"} <= kinds
        with client.messages.stream(**saying(BOTH), max_tokens=99, tools=[get_weather.to_dict()]) as stream:
            partial = [event.partial_json for event in stream if event.type == "input_json"]
            uses = [block for block in stream.get_final_message().content if block.type == "tool_use"]
        assert [use.input["city"] for use in uses] == ["Oslo", "Bergen"] and len(partial) > 2
        for streamed in (False, True):
            called: list[tuple[str, int]] = []
            runner = client.beta.messages.tool_runner(
                **saying("The weather in Oslo?"), max_tokens=99, tools=[get_weather], stream=streamed
            )
            final = runner.until_done()
            assert called == [("Oslo", 2)] and final.content[0].text == "It is 12 degrees in Oslo."


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_litellm(server: Server, tmp_path: Path) -> None:
    """As a client of all APIs: hello, calls and what follows their results, an object, vectors."""
    program = Path(__file__).with_name("litellm_client.py")
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [python_with(*LITELLM), program, server.url, KEY],
        capture_output=True, text=True, timeout=200, check=False, env=os.environ | own,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told.pop("completions") == told.pop("responses") == HELLO and told.pop("embeddings") == [8, 8]
    assert set(told) == {"openai", "hosted_vllm", "anthropic"}
    calls = [["get_weather", {"city": city, "days": 2}] for city in ("Oslo", "Bergen")]
    for provider in told.values():
        assert provider.pop("pieces") > 4
        assert provider == {
            "text": HELLO, "streamed": HELLO, "async": HELLO, "finish": "stop", "tokens": True,
            "calls": calls, "streamed_calls": calls, "calls_finish": "tool_calls",
            "after": "It is 12 degrees in Oslo.", "object": {"city": "Oslo", "days": 3}, "error": True,
        }  # fmt: skip
