"""The OpenAI Python SDK, unmodified, against the real demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.http.server import Server, running_server

pytestmark = pytest.mark.real_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    flags = ("--max-model-len", "1024", "--kv-cache-memory-bytes", str(256 << 20))
    with running_server(tmp_path_factory.mktemp("sdk"), *flags) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8 and answer.usage.prompt_tokens == 37


def test_chat_streaming(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8


def test_the_sdks_own_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="demo", messages=QUESTION, temperature=0) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_completions_streaming(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="demo",
        prompt="The capital of France is",
        temperature=0,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "Paris" in "".join(c.choices[0].text for c in chunks if c.choices)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4


def test_the_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    """An assistant message as the SDK dumps it, its empty fields included, is a valid message."""
    first = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    said = first.choices[0].message.model_dump()
    messages = [*QUESTION, said, {"role": "user", "content": "And of Germany?"}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=20)
    assert "Berlin" in (answer.choices[0].message.content or "")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_errors_are_the_sdks(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-none", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=5)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt="x", max_tokens=5000)
    assert long.value.code == "context_length_exceeded"


def test_a_seed_fixes_the_answer(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model="demo", prompt="Once", seed=5, max_tokens=12).choices[0].text
        for _ in range(2)
    }
    assert len(texts) == 1
