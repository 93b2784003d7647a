"""A limit on reasoning: so many tokens, then its end, whatever the model would rather write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from servelite.frontend.errors import APIError
from servelite.frontend.forced_calls import chat_grammar
from servelite.frontend.parsers.formats import REASONING_FORMATS, Begin, ChatFormats, ReasoningFormat
from servelite.frontend.thinking import ThinkingLimit, thinking_limit, thinking_tokens
from servelite.tokenizer.grammar import Grammars
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer

# The demo model has no tokens for reasoning; two that it does have stand in for them.
FORM = ReasoningFormat("stand-in", "<repo_name>", "<file_sep>")
OPENING, CLOSING, END, LETTER = 3, 5, 2, 330


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(open_model_files(demo_model))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def limit(budget: int, tokenizer: Tokenizer) -> ThinkingLimit:
    return thinking_limit(budget, thinking_tokens(FORM, tokenizer.added_id))


def driven(grammars: Grammars, grammar: str, wanted: Sequence[int], most: int = 40) -> list[int]:
    """What a model writes that wants `wanted`, and after it letters: where that is not allowed, the first
    token that is."""
    matcher, ids = grammars.compile(grammar), list[int]()
    while len(ids) < most and not matcher.over:
        words = np.zeros(2048, np.uint32)
        matcher.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        want = wanted[len(ids)] if len(ids) < len(wanted) else LETTER
        ids.append(want if bits[want] else int(bits.argmax()))
        matcher.accept(ids[-1:])
    return ids


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_ends_after_its_budget(budget: int, grammars: Grammars, tokenizer: Tokenizer) -> None:
    held = limit(budget, tokenizer)
    ids = driven(grammars, held.grammar(Begin.INSIDE), [])
    assert ids == [LETTER] * budget + [CLOSING] + [LETTER] * (39 - budget)
    ids = driven(grammars, held.grammar(Begin.ANYWHERE), [OPENING])
    assert ids == [OPENING] + [LETTER] * budget + [CLOSING] + [LETTER] * (38 - budget)


def test_shorter_reasoning_and_none_are_left_alone(grammars: Grammars, tokenizer: Tokenizer) -> None:
    held = limit(9, tokenizer)
    told = [LETTER, CLOSING, 1, LETTER, END]
    assert driven(grammars, held.grammar(Begin.INSIDE), told) == told
    assert driven(grammars, held.grammar(Begin.ANYWHERE), [LETTER, 1, END]) == [LETTER, 1, END]
    again = driven(grammars, held.grammar(Begin.ANYWHERE), [OPENING, CLOSING, OPENING, LETTER])
    assert OPENING not in again[1:]  # it cannot begin once more, without a limit


@pytest.mark.parametrize("begin", [Begin.INSIDE, Begin.ANYWHERE])
def test_a_form_of_answer_follows_the_end(begin: Begin, grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = chat_grammar(
        [],
        grammar_text(GrammarKind.CHOICE, ["yes"]),
        ChatFormats(None, FORM),
        tokenizer.split_controls,
        parallel=True,
        begin=begin,
        limit=limit(3, tokenizer),
    )
    opening = [] if begin is Begin.INSIDE else [OPENING]
    ids = driven(grammars, grammar, opening)
    thought = [*opening, LETTER, LETTER, LETTER, CLOSING]
    assert ids[: len(thought)] == thought
    assert tokenizer.decode(ids[len(thought) :]).strip() == "yes"


def test_a_model_that_cannot_be_held_to_it_says_so(tokenizer: Tokenizer) -> None:
    for form in (None, *REASONING_FORMATS):  # none of whose words are tokens of the demo model's
        assert thinking_tokens(form, tokenizer.added_id) is None
    with pytest.raises(APIError) as caught:
        thinking_limit(9, None)
    assert caught.value.status == 400 and caught.value.param == "thinking_token_budget"
