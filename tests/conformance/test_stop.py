"""Stop strings: what is held back comes, what stands behind one never does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.conformance.target import COMPLETIONS, GREEDY, Target

PROMPTS = ["Once upon a time", "The weather in spring is", "She opened the door and", "A list of colours:"]


@dataclass
class Oracle:
    """An answer without stops."""

    body: dict
    text: str


@pytest.fixture(scope="module")
def oracle(each: Target) -> Oracle:
    """One with enough text, of whole characters."""
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 48, "ignore_eos": True} | GREEDY
        text = each.both(COMPLETIONS, body).text
        if len(text) > 100 and "\ufffd" not in text:
            return Oracle(body, text)
    raise AssertionError("no prompt gives enough text")


def test_stp_02_text_held_back_is_released(each: Target, oracle: Oracle) -> None:
    """STP-02. The text ends with the beginning of a stop string."""
    answer = each.both(COMPLETIONS, oracle.body | {"stop": [oracle.text[-3:] + "ZQX9"]})
    assert answer.text == oracle.text and answer.finish_reason == "length"


def test_stp_02_nothing_waits_for_a_stop_that_no_text_begins(each: Target, oracle: Oracle) -> None:
    """STP-02, third line: no chunk comes more than a token later than without a stop string."""
    stop = "\u2603ZQX9"
    assert stop[0] not in oracle.text
    asked = oracle.body | {"return_token_ids": True}
    free = _text_by_tokens(each, asked)
    held = _text_by_tokens(each, asked | {"stop": [stop * 5]})
    if not free:
        pytest.skip("the server does not say which tokens a chunk holds")
    assert held[max(held)] == free[max(free)] == oracle.text
    for tokens, text in held.items():
        before = max((count for count in free if count < tokens), default=0)
        assert len(text) >= len(free.get(before, "")), (tokens, text)


def _text_by_tokens(target: Target, body: dict) -> dict[int, str]:
    """The text that a stream had told after so many tokens."""
    told: dict[int, str] = {}
    tokens, text = 0, ""
    for chunk in target.events(COMPLETIONS, body).chunks:
        for choice in chunk["choices"]:
            tokens, text = tokens + len(choice.get("token_ids") or []), text + choice["text"]
            told[tokens] = text
    return told if tokens else {}


def test_stp_05_the_first_complete_stop_wins(each: Target, oracle: Oracle) -> None:
    """STP-05. In the text's order, not the list's; nothing behind it comes out, in a stream either."""
    text = oracle.text
    first, second = _new_piece(text, 30), _new_piece(text, 70)
    a, b = text[first : first + 6], text[second : second + 6]
    for stops in ([b, a], [a, b]):  # the second stands behind the first
        answer = each.both(COMPLETIONS, oracle.body | {"stop": stops})
        assert answer.text == text[:first] and answer.finish_reason == "stop"
        assert answer.counts["completion_tokens"] < 48
    c, d = text[first : first + 6], text[first + 2 : first + 5]
    answer = each.both(COMPLETIONS, oracle.body | {"stop": [c, d]})
    assert text.startswith(answer.text) and c not in answer.text
    place = text.find(d)
    assert len(answer.text) in ({first, first + 2} if place == first + 2 else {place})


def _new_piece(text: str, least: int) -> int:
    """Where, from `least` on, six characters stand that do not stand before."""
    return next(at for at in range(least, len(text)) if text.find(text[at : at + 6]) == at)


def test_stp_05_a_stop_that_spans_tokens(each: Target, oracle: Oracle) -> None:
    """The kind of STP-05: wherever a stop string begins and ends, the text before it is what is told."""
    for begin in range(10, 90, 16):
        stop = oracle.text[begin : begin + 9]
        at = oracle.text.find(stop)
        assert each.both(COMPLETIONS, oracle.body | {"stop": stop}).text == oracle.text[:at]
