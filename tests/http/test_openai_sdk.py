"""The OpenAI Python SDK, unmodified, against the real demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import openai
import pydantic
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


class Capital(pydantic.BaseModel):
    """A form that any answer ends soon in."""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]
    sure: bool


def test_an_answer_is_parsed_into_a_form(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "messages": QUESTION, "temperature": 0, "response_format": Capital}
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed  # type: ignore[call-overload]
    assert (parsed.country, parsed.capital) == ("France", "Paris")
    with client.chat.completions.stream(**asked) as stream:  # type: ignore[call-overload]
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_eight_answers_of_one_seed_differ_and_repeat(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(
            model="demo", prompt="Once upon a time", n=8, seed=11, temperature=1, max_tokens=12
        )
        return [choice.text for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 8
    assert ask() == first


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


def test_several_answers_and_prompts(client: openai.OpenAI) -> None:
    """`n` with one seed: different answers, the same ones again."""
    prompts = ["Once upon a time", [504, 505]]
    texts = []
    for _ in range(2):
        answer = client.completions.create(model="demo", prompt=prompts, n=4, seed=3, max_tokens=12)
        assert [choice.index for choice in answer.choices] == list(range(8))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 4 + 2 and answer.usage.completion_tokens <= 8 * 12
        texts.append([choice.text for choice in answer.choices])
    assert texts[0] == texts[1]
    assert len(set(texts[0][:4])) == len(set(texts[0][4:])) == 4


def test_logprobs_plain_and_streaming(client: openai.OpenAI) -> None:
    options = {"model": "demo", "messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    plain = client.chat.completions.create(**options).choices[0].logprobs
    assert plain is not None and plain.content is not None
    said = plain.content[:-1]  # less the stop token
    assert b"".join(bytes(entry.bytes or []) for entry in said).decode() == ANSWER
    for entry in said:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob) and entry.logprob <= 0
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    chunks = client.chat.completions.create(**options, stream=True)
    streamed = [c.choices[0].logprobs.content or [] for c in chunks if c.choices[0].logprobs]
    told = [entry for part in streamed for entry in part]
    assert [entry.token for entry in told] == [entry.token for entry in plain.content]
    assert [entry.logprob for entry in told] == pytest.approx(
        [entry.logprob for entry in plain.content], abs=1e-4
    )


def test_an_echoed_prompt_is_scored_as_its_continuation_was(client: openai.OpenAI) -> None:
    """The logprobs of a greedy answer's tokens are those the same tokens get as a prompt."""
    options = {"model": "demo", "temperature": 0, "logprobs": 0}
    answer = client.completions.create(**options, prompt="The capital of France is", max_tokens=6)
    made = answer.choices[0]
    whole = "The capital of France is" + made.text
    echoed = client.completions.create(**options, prompt=whole, max_tokens=1, echo=True).choices[0]
    assert made.logprobs is not None and echoed.logprobs is not None
    assert echoed.text.startswith(whole)
    assert echoed.logprobs.token_logprobs is not None and echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.tokens is not None and made.logprobs.tokens is not None
    at = len(echoed.logprobs.tokens) - 1 - len(made.logprobs.tokens)
    assert echoed.logprobs.tokens[at:-1] == made.logprobs.tokens
    scores = echoed.logprobs.token_logprobs[at:-1]
    assert scores == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)


def test_a_prefix_is_found_again(client: openai.OpenAI) -> None:
    body = {"model": "demo", "messages": QUESTION, "temperature": 0, "extra_body": {"cache_salt": "sdk"}}
    cached = []
    for _ in range(2):
        usage = client.chat.completions.create(**body).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 32]


def test_forced_and_forbidden_tokens(client: openai.OpenAI) -> None:
    ask = {"model": "demo", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
    plain = client.completions.create(**ask, extra_body={"return_token_ids": True}).choices[0]
    assert plain.text.startswith(" Paris") and plain.model_extra is not None
    paris = str(plain.model_extra["token_ids"][0])
    for fields in ({"bad_words": ["Paris"]}, {"logit_bias": {paris: -100}}):
        assert "Paris" not in client.completions.create(**ask, extra_body=fields).choices[0].text
    only = client.completions.create(**ask, extra_body={"allowed_token_ids": [504]})
    assert only.choices[0].text == "TheTheTheThe"


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
