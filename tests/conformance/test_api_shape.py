"""The API's shape: validation errors, fields that ask nothing, and tokens counted alike everywhere."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.conformance.target import CHAT, COMPLETIONS, GREEDY, TOOL, Target, error_of

X = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": {"role": "user", "content": "x"}}, "messages"),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": X, "temperature": "hot"}, "temperature"),
        ({"messages": [{"role": 5, "content": "x"}]}, "role"),
    ],
    ids=["type", "missing", "none", "hot", "role"],
)
def test_api_02_validation_errors(target: Target, fields: dict[str, Any], param: str) -> None:
    """API-02. A 400 in OpenAI's envelope, the field named, by the SDK's eyes too."""
    error = target.refused(CHAT, fields)
    assert param in error["message"] and param in error["param"]
    assert "Traceback" not in error["message"] and "<class" not in error["message"]
    made = openai.OpenAI(base_url=f"{target.url}/v1", api_key=target.key or "none", max_retries=0)
    with made as client, pytest.raises(openai.BadRequestError) as raised:
        client.post("/chat/completions", body={"model": target.model} | fields, cast_to=object)
    assert raised.value.message and isinstance(raised.value.body, dict)


def test_api_02_null_is_absent(target: Target) -> None:
    """API-02, nulls."""
    names = (
        "temperature", "top_p", "n", "stop", "stream", "seed", "logit_bias", "tools", "tool_choice",
        "response_format", "user", "logprobs", "presence_penalty",
    )  # fmt: skip
    reply = target.post(CHAT, {"messages": X, "max_tokens": 2} | dict.fromkeys(names))
    assert reply.status_code == 200, reply.text


HARMLESS = {"store": False, "metadata": {}, "service_tier": "auto", "user": "u-1", "logit_bias": {}}


def test_api_02_fields_that_ask_nothing(target: Target) -> None:
    """API-02, extra, without the field that nobody knows."""
    target.both(CHAT, {"messages": X, "max_tokens": 2} | HARMLESS | GREEDY)


def test_api_02_an_unknown_field_with_unknown_fields_warn(odd: Target) -> None:
    """API-02, extra: the switch for clients that send more."""
    odd.both(CHAT, {"messages": X, "max_tokens": 2, "foo": 1} | HARMLESS | GREEDY)


def test_api_02_an_unknown_field_is_named(scripted: Target) -> None:
    """API-02, extra, by default: nothing is accepted and ignored."""
    error = scripted.refused(CHAT, {"messages": X, "max_tokens": 2, "foo": 1})
    assert error["param"] == "foo" and "foo" in error["message"]


TEXT = "Hi  there\né 😀 <|im_end|>"


def test_cmp_02_tokenize_agrees_with_generation(target: Target) -> None:
    """CMP-02."""
    whole = target.post("/tokenize", {"prompt": TEXT}).json()
    assert whole["count"] == len(whole["tokens"]) and whole["max_model_len"] == target.max_model_len
    bare = target.tokens_of(TEXT)
    extra = len(whole["tokens"]) - len(bare)
    assert extra in (0, 1) and whole["tokens"][extra:] == bare
    assert target.post("/detokenize", {"tokens": bare}).json() == {"prompt": TEXT}
    once = {"max_tokens": 1} | GREEDY
    assert target.both(COMPLETIONS, {"prompt": TEXT} | once).counts["prompt_tokens"] == whole["count"]
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    counted = target.post("/tokenize", chat).json()["count"]
    assert target.both(CHAT, chat | once).counts["prompt_tokens"] == counted


def test_cmp_02_tokenize_counts_tools_too(target: Target) -> None:
    """CMP-02, with tools given to both."""
    target.needs("tools")
    chat = {"messages": X, "tools": [TOOL]}
    reply = target.post("/tokenize", chat)
    assert reply.status_code == 200, reply.text
    answer = target.both(CHAT, chat | {"max_tokens": 1} | GREEDY)
    assert answer.counts["prompt_tokens"] == reply.json()["count"]


def test_cmp_02_bad_requests(target: Target) -> None:
    """CMP-02, bad."""
    for body in ({}, {"messages": []}, {"prompt": "x", "messages": X}):
        reply = target.post("/tokenize", body)
        assert reply.status_code == 400
        error_of(reply)
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        reply = target.post(path, body | {"model": "nobody"})
        assert reply.status_code == 404
        error_of(reply)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", CHAT), ("POST", COMPLETIONS),
        ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/nowhere"),
    ],
)  # fmt: skip
def test_cmp_02_every_route_needs_the_key(odd: Target, method: str, path: str) -> None:
    """CMP-02: the routes beside /v1 too."""
    for given in ("", "Bearer wrong", f"Basic {odd.key}"):
        reply = odd.client.request(method, path, json={}, headers={"authorization": given})
        assert reply.status_code == 401
        error_of(reply)
    assert odd.client.get("/health", headers={"authorization": ""}).status_code == 200
