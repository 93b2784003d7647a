"""The detokenizer against decoding the whole, for any IDs and any division into pushes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelite.tokenizer.detokenizer import Detokenizer
from servelite.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.test_stop_strings import first_stop, split
from tests.tokenizer.texts import TEXTS

# Bytes of unfinished characters and control tokens have low IDs: they come up more often this way.
ids_lists = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49_160), st.integers(-2, 20)), max_size=40)
cuts_lists = st.lists(st.integers(0, 40), max_size=10)


def pushes(ids: list[int], cuts: list[int]) -> list[list[int]]:
    marks = split("." * len(ids), cuts)
    out, at = [], 0
    for mark in marks:
        out.append(ids[at : at + len(mark)])
        at += len(mark)
    return out


@given(ids=ids_lists, cuts=cuts_lists, skip=st.booleans())
def test_the_parts_add_up_to_the_whole(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    parts = [detokenizer.push(some) for some in pushes(ids, cuts)]
    known = [index for index in ids if 0 <= index < tokenizer.vocab_size]
    whole = tokenizer._backend.decode(known, skip_special_tokens=skip)
    assert "".join(parts) + detokenizer.finish() == whole
    assert whole.startswith("".join(parts))


@given(text=st.sampled_from(TEXTS))
def test_a_valid_text_never_shows_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.push([index]) for index in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(parts) == text and detokenizer.finish() == ""


@given(
    ids=ids_lists,
    cuts=cuts_lists,
    stops=st.lists(
        st.sampled_from(["e", "th", " the", "\ufffd", "\ufffd\ufffd", "a", "\n", "<|im_end|>", "12", "é"])
        | st.text(min_size=1, max_size=3),
        max_size=4,
    ),
    include=st.booleans(),
    skip=st.booleans(),
)
def test_with_stop_strings_it_is_the_whole_cut_at_the_first(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], stops: list[str], include: bool, skip: bool
) -> None:
    detokenizer = Detokenizer(tokenizer, stop=tuple(stops), include_stop=include, skip_special_tokens=skip)
    out = "".join(detokenizer.push(some) for some in pushes(ids, cuts)) + detokenizer.finish()
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    expected = first_stop(whole, stops)
    if expected is None:
        assert (out, detokenizer.stopped, detokenizer.stop_token_count) == (whole, None, 0)
        return
    start, stop = expected
    assert detokenizer.stopped == stop
    assert out == whole[:start] + (stop if include else "")
    # No fewer tokens complete the stop string: with one less it is not there yet.
    count = detokenizer.stop_token_count
    fewer = Detokenizer(tokenizer, stop=tuple(stops), skip_special_tokens=skip)
    fewer.push(ids[: count - 1])
    assert fewer.stopped is None
    enough = Detokenizer(tokenizer, stop=tuple(stops), skip_special_tokens=skip)
    enough.push(ids[:count])
    if enough.stopped is None:  # only where the last character is a broken one that finish gave up on
        enough.finish()
    assert enough.stopped == stop


def test_a_stop_string_across_tokens_is_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("One\n\nUser: two", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, stop=("\n\nUser:",))
    parts = [detokenizer.push([index]) for index in ids]
    assert "".join(parts) == "One" and detokenizer.stopped == "\n\nUser:"
    assert tokenizer.decode(ids[: detokenizer.stop_token_count]).endswith("User:")
    assert detokenizer.push(ids) == "" and detokenizer.finish() == ""


def test_what_was_held_for_nothing_comes_out(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=("world peace",))
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    assert [detokenizer.push([index]) for index in ids] == ["Hello", " "]
    assert detokenizer.finish() == "world" and detokenizer.stopped is None


def test_an_unfinished_character_is_held_until_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001fae0", add_special_tokens=False)
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([index]) for index in ids] == [""] * (len(ids) - 1) + ["\U0001fae0"]
    unfinished = Detokenizer(tokenizer)
    assert unfinished.push(ids[:-1]) == "" and unfinished.finish() == tokenizer.decode(ids[:-1]) == "\ufffd"


@pytest.mark.parametrize("skip", [True, False])
def test_control_tokens_are_text_only_when_asked_for(tokenizer: Tokenizer, skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert detokenizer.push([19556, 2]) == ("Hello" if skip else "Hello<|im_end|>")


def test_a_sentencepiece_text_loses_the_space_it_begins_with(spm: Tokenizer) -> None:
    ids = spm.encode("hi é hi", add_special_tokens=True)
    detokenizer = Detokenizer(spm)
    assert "".join(detokenizer.push([index]) for index in ids) + detokenizer.finish() == "hi é hi"
