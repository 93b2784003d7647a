"""The byte templates make valid JSON of OpenAI's shape, whatever the text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from servelite.frontend.chunks import AnswerHead, Choice, StreamTemplate, Usage, whole_answer
from servelite.frontend.parsers.assembled import Assembled
from servelite.frontend.protocol import AnswerForm


def template(chat: bool, include_usage: bool = False, model: str = 'a "model"') -> StreamTemplate:
    return StreamTemplate(AnswerHead(chat, "id-1", 5, model), AnswerForm(include_usage=include_usage))


def load(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
    return json.loads(event[6:])


@given(st.text(), st.text(), st.booleans(), st.booleans())
def test_text_survives(text: str, model: str, chat: bool, include_usage: bool) -> None:
    chunk = load(template(chat, include_usage, model).text(text))
    choice = chunk["choices"][0]
    assert (choice["delta"]["content"] if chat else choice["text"]) == text
    assert chunk["model"] == model
    assert ("usage" in chunk) == include_usage and chunk.get("usage") is None


def test_chat_chunks_are_the_sdks() -> None:
    made = template(True, include_usage=True)
    for event in (made.first(None), made.text("x"), made.finish("stop", None), last(made)):
        ChatCompletionChunk.model_validate(load(event), strict=True)
    assert load(made.first(None))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    calling = StreamTemplate(AnswerHead(True, "id-1", 5, "m", may_call=True), AnswerForm())
    assert load(calling.first(None))["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert load(made.finish("length", None))["choices"][0]["finish_reason"] == "length"
    end = load(last(made))
    assert end["choices"] == []
    assert end["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def last(made: StreamTemplate) -> bytes:
    """The chunk before the last event."""
    chunk, done = made.done(Usage(3, 4)).split(b"data: [DONE]")
    assert done == b"\n\n"
    return chunk


def test_completion_chunks() -> None:
    made = template(False)
    assert made.first(None) == b""
    assert load(made.finish("stop", None))["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert load(made.text("x"))["object"] == "text_completion"


@pytest.mark.parametrize("chat", [True, False])
def test_whole_answers_are_the_sdks(chat: bool) -> None:
    choices = [Choice(Assembled("hé"), "stop", None, {}), Choice(Assembled("b"), "length", None, {})]
    body = whole_answer(AnswerHead(chat, "i", 1, "m"), choices, Usage(1, 2))
    (ChatCompletion if chat else Completion).model_validate(json.loads(body), strict=True)
