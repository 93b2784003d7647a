"""Stop strings: the first one complete wins, and nothing that may begin one is let out."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from servelite.tokenizer.stop_strings import StopMatcher

few = st.text(st.sampled_from("ab"), max_size=40)
stops_of_few = st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By definition: the stop string that ends first, the longest of those; where it begins."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


def split(text: str, cuts: list[int]) -> list[str]:
    at = sorted({min(cut, len(text)) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@given(text=few, stops=stops_of_few, cuts=st.lists(st.integers(0, 40), max_size=8))
@example(text="aab", stops=["ab", "aab"], cuts=[1, 2])
@example(text="xabcd", stops=["abcx", "bc"], cuts=[])
def test_any_division_of_the_text_gives_the_same_answer(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    out, found = "", None
    for piece in split(text, cuts):
        safe, found = matcher.push(piece)
        out += safe
        if found:
            break
    else:
        out += matcher.release()
    expected = first_stop(text, stops)
    if expected is None:
        assert (out, found) == (text, None)
    else:
        assert (out, found) == (text[: expected[0]], expected[1])


@given(text=few, stops=stops_of_few)
def test_what_is_held_is_the_longest_end_that_begins_a_stop_string(text: str, stops: list[str]) -> None:
    if first_stop(text, stops):
        return
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(character)[0] for character in text)
    held = text[len(out) :]
    begins = [text[i:] for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops)]
    assert held == max(begins, key=len, default="")


def test_characters_with_a_meaning_in_patterns_are_themselves() -> None:
    for stop in ("]", "^x", "\\", "-", "[a-z]", "a]", "."):
        assert StopMatcher([stop]).push(f"one {stop} two") == ("one ", stop)


def test_empty_stop_strings_count_for_nothing() -> None:
    matcher = StopMatcher([""])
    assert matcher.push("text") == ("text", None) and matcher.release() == ""


@pytest.mark.parametrize("stop", ["a" * 4000 + "b", "ab" * 2000 + "c"])
def test_a_hostile_stop_string_costs_no_more_than_another(stop: str) -> None:
    """Matching is linear: a quadratic search of these 40,000 characters would take minutes."""
    matcher = StopMatcher([stop])
    start = time.perf_counter()
    for _ in range(20_000):
        assert matcher.push("ab" if stop[1] == "b" else "aa")[1] is None
    assert time.perf_counter() - start < 5.0
