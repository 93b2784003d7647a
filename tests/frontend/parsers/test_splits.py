"""Every way to cut one answer of each format in two, and around each character; and each reasoning format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servelite.frontend.parsers.formats import (
    REASONING_FORMAT_NAMES,
    TOOL_FORMAT_NAMES,
)
from tests.frontend.parsers.samples import BARE, Calls, cut, read, reasoning_format, write

CALLS: Calls = [
    (
        "get_weather",
        {"city": "Münster\n\n東京 😀 'q' \\ {[(", "days": -1, "more": {"a": [1, {"b": "]}"}], "c": ""}},
    ),
    ("ping", {}),
    ("get_weather", {"more": {"d": {"e": {"f": [[], {}]}}}, "exact": True}),
]
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<|[]{}`\r"), max_size=20)


def answer(form: str, lead: str, between: str, calls: Calls) -> str:
    """Calls with other text before and between them, as far as the format has room for such."""
    if form == "openai":
        texts = [f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>" for text in (lead, between)]
    else:
        texts = ["" if form in BARE else lead, between]
    if form in (*BARE, "mistral"):  # one list: what stands behind it is no beginning of another
        return texts[0] + write(form, calls)
    return texts[0] + write(form, calls[:1]) + texts[1] + (write(form, calls[1:]) if calls[1:] else "")


@pytest.mark.parametrize("form", TOOL_FORMAT_NAMES)
def test_wherever_it_is_cut(form: str) -> None:
    text = answer(form, "Müßig: ", " und 東京 😀 <b> ", CALLS)
    whole = read([text], form)
    assert whole.parsed == CALLS and whole.ended == (0, 1, 2)
    for at in range(len(text)):
        assert read([text[:at], text[at:]], form) == whole
        assert read([text[:at], text[at], text[at + 1 :]], form) == whole


@pytest.mark.parametrize("form", TOOL_FORMAT_NAMES)
def test_wherever_it_ends(form: str) -> None:
    """A truncated answer is the beginning of the whole one, and the same in one piece or character by
    character."""
    text = answer(form, "Müßig: ", " und 東京 😀 <b> ", CALLS)
    whole = read([text], form)
    for at in range(len(text)):
        found = read(list(text[:at]), form)
        assert read([text[:at]], form) == found
        assert len(found.calls) <= len(whole.calls)
        for (name, arguments), (full_name, all_of_it) in zip(found.calls, whole.calls, strict=False):
            assert name == full_name and all_of_it.startswith(arguments)
        for index in found.ended:
            assert json.loads(found.calls[index][1]) == CALLS[index][1]


@pytest.mark.parametrize("form", TOOL_FORMAT_NAMES)
@settings(max_examples=25)
@given(lead=PLAIN, between=PLAIN, cuts=st.lists(st.integers(0, 10**6), max_size=30), count=st.integers(1, 3))
def test_text_between_calls_is_content(
    form: str, lead: str, between: str, cuts: list[int], count: int
) -> None:
    text = answer(form, lead, between, CALLS[:count])
    for pieces in ([text], list(text), cut(text, cuts)):
        found = read(pieces, form)
        assert found.parsed == CALLS[:count]
        if form not in (*BARE, "mistral"):
            # White space beside a call is nobody's text.
            assert "".join(found.content.split()) == "".join((lead + between).split())


@pytest.mark.parametrize("name", REASONING_FORMAT_NAMES)
@pytest.mark.parametrize("tools", ["", "hermes", "qwen3_coder"])
@settings(max_examples=25)
@given(
    thought=PLAIN.map(str.strip).filter(bool),
    content=PLAIN.map(str.strip).filter(bool),
    cuts=st.lists(st.integers(0, 10**6), max_size=30),
    opened=st.booleans(),
)
def test_each_reasoning_format(
    name: str, tools: str, thought: str, content: str, cuts: list[int], opened: bool
) -> None:
    """Thought and answer are told apart, a call behind them too, whether or not the prompt opened it."""
    form: Any = reasoning_format(name)
    call = write(tools, [("ping", {})]) if tools else ""
    if form.opening:
        text = ("" if opened else form.opening) + f"{thought}\n{form.closing}\n\n{content}{call}"
    else:
        thinking, told = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
        text = f"{thinking}{thought}<|end|><|start|>assistant{told}{content}{call}"
    whole = read([text], tools, name, opened=opened)
    assert whole.reasoning == thought
    assert whole.content == content + ("" if form.opening else call)  # of harmony's, another format's call
    assert [called for called, _ in whole.calls] == (["ping"] if tools and form.opening else [])
    for pieces in (list(text), cut(text, cuts)):
        assert read(pieces, tools, name, opened=opened) == whole
