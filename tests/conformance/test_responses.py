"""The Responses API: input of every form reaches the model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.target import Target, error_of

PATH = "/v1/responses"
SHORT = {"max_output_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def responding(target: Target) -> Target:
    target.has_route(PATH)
    return target


def said(target: Target, value: Any, **more: Any) -> tuple[int, str]:
    """Input tokens and text of an answer."""
    reply = target.post(PATH, {"input": value} | SHORT | more)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    texts = [
        part["text"]
        for item in body["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    ]
    return body["usage"]["input_tokens"], "".join(texts)


def test_rsp_02_text_message_and_typed_message_are_one(responding: Target) -> None:
    """RSP-02, str, arr and typed."""
    plain = said(responding, "alpha beta")
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "alpha beta"}]}]
    typed = [{"type": "message", "role": "user", "content": "alpha beta"}]
    assert said(responding, parts) == said(responding, typed) == plain
    assert said(responding, "alpha beta gamma")[0] > plain[0]


def test_rsp_02_every_turn_counts(responding: Target) -> None:
    """RSP-02, turns: each item makes the prompt longer."""
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 3 + 18?"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I will add them."}],
        },
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 3, "b": 18}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "21"},
        {"role": "user", "content": "Thanks. And now?"},
    ]
    counts = [said(responding, turns[:length])[0] for length in (1, 2, 4, 5)]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    ("name", "output", "told"),
    [("zebra_sum", "21", "the name of the call is there"), ("add", "quagga 21", "its output is there")],
)
def test_rsp_02_a_call_and_its_output_reach_the_model(
    scripted: Target, name: str, output: str, told: str
) -> None:
    """RSP-02, turns: in the rendered prompt, by which the script answers."""
    turns = [
        {"role": "user", "content": "What is 3 + 18?"},
        {"type": "function_call", "call_id": "call_1", "name": name, "arguments": '{"a": 3, "b": 18}'},
        {"type": "function_call_output", "call_id": "call_1", "output": output},
    ]
    assert said(scripted, turns, max_output_tokens=20)[1] == told


def test_rsp_02_refusals(responding: Target) -> None:
    """RSP-02, unk and bad."""
    for body, statuses in (
        ({"input": "x", "previous_response_id": "resp_nope"}, (400, 404)),
        ({"input": [{"role": "user", "content": [{"type": "input_nothing"}]}]}, (400,)),
    ):
        reply = responding.post(PATH, body)
        assert reply.status_code in statuses, reply.text
        error_of(reply)
