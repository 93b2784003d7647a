"""What checks grammars with a vocabulary of bytes says of them what the whole vocabulary does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from servelite.tokenizer.byte_vocabulary import ByteVocabulary
from servelite.tokenizer.grammar import GrammarError, Grammars
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text
from servelite.tokenizer.tokenizer import Tokenizer

RIGHT: list[tuple[GrammarKind, Any]] = [
    (GrammarKind.REGEX, "[a-zé]{1,40}( ☃)?"),
    (GrammarKind.CHOICE, ["yes", "no", "ünïcode"]),
    (GrammarKind.JSON_OBJECT, None),
    (GrammarKind.JSON_SCHEMA, {"type": "object", "properties": {"a": {"format": "date"}}, "required": ["a"]}),
    (GrammarKind.LARK, 'start: "x" <|im_start|> /[0-9]+/'),  # a control token by name
    (GrammarKind.LARK, "start: <[20000-20010]> /[0-9]+/"),  # tokens by number
]
WRONG: list[tuple[GrammarKind, Any]] = [
    (GrammarKind.REGEX, "(a"),
    (GrammarKind.REGEX, ""),
    (GrammarKind.JSON_SCHEMA, {"allOf": [{"type": "string"}, {"type": "integer"}]}),
    (GrammarKind.LARK, "start: <|no_such_token|>"),
    (GrammarKind.LARK, "start: <[99999999]>"),
    (GrammarKind.LARK, "start: missing"),
    (GrammarKind.LARK, "start: <|im_end|>"),  # the end, and nothing before it
]


@pytest.fixture(scope="module")
def both(tokenizer: Tokenizer) -> tuple[Grammars, Grammars]:
    return Grammars(tokenizer), Grammars(ByteVocabulary.of(tokenizer))


@pytest.mark.parametrize(("kind", "value"), RIGHT)
def test_both_take_a_right_grammar(both: tuple[Grammars, Grammars], kind: GrammarKind, value: Any) -> None:
    for grammars in both:
        grammars.compile(grammar_text(kind, value))


@pytest.mark.parametrize(("kind", "value"), WRONG)
def test_both_refuse_a_wrong_one_alike(
    both: tuple[Grammars, Grammars], kind: GrammarKind, value: Any
) -> None:
    told = []
    for grammars in both:
        with pytest.raises(GrammarError) as caught:
            grammars.compile(grammar_text(kind, value))
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_a_vocabulary_of_bytes_is_read_in_a_fraction_of_the_time(tokenizer: Tokenizer) -> None:
    def least(read: partial[Grammars]) -> float:
        times = []
        for _ in range(3):
            began = time.thread_time()
            read()
            times.append(time.thread_time() - began)
        return min(times)

    assert least(partial(Grammars, ByteVocabulary.of(tokenizer))) < least(partial(Grammars, tokenizer)) / 1.8


def test_a_vocabulary_too_small_for_all_bytes_is_read_whole() -> None:
    class Letters:
        vocab_size, eos_token_ids, bos_token_id = 27, (26,), None
        special_ids, special_tokens = frozenset({26}), ("<end>",)

        def token_bytes(self, token: int) -> bytes:
            return bytes([ord("a") + token]) if token < 26 else b"<end>"

        def encode_rendered(self, text: str, controls: Sequence[tuple[int, int]]) -> list[int]:
            return [26, *(ord(letter) - ord("a") for letter in text.removeprefix("<end>"))]

    grammars = Grammars(ByteVocabulary.of(Letters()))  # type: ignore[arg-type]
    grammars.compile(grammar_text(GrammarKind.REGEX, "z+"))
    with pytest.raises(GrammarError, match="no text"):
        grammars.compile(grammar_text(GrammarKind.REGEX, "[0-9]+"))
