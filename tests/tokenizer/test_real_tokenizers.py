"""Detokenizing any tokens of three real tokenizers: byte-level BPE, SentencePiece with bytes, WordPiece."""

from __future__ import annotations

from codecs import getincrementaldecoder
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelite.tokenizer.detokenizer import Detokenizer
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.test_detokenizer import pushes
from tests.tokenizer.test_stop_strings import first_stop
from tests.tokenizer.texts import TEXTS

CUTS = st.lists(st.integers(0, 40), max_size=10)
STOPS = ["e", "th", " the", "\ufffd", "\ufffd\ufffd", "é", "\n", " ", "##", "12", "🜁", "東京"]


@pytest.fixture(scope="module", params=["demo_model", "gemma_model", "minilm_model", "spm"])
def kind(request: pytest.FixtureRequest) -> tuple[Tokenizer, list[int]]:
    """A tokenizer, and its tokens that are no whole characters, or none, or control tokens; the three, and a
    small one whose texts lose the space they begin with."""
    made: Path | Tokenizer = request.getfixturevalue(request.param)
    tokenizer = made if isinstance(made, Tokenizer) else load_tokenizer(open_model_files(made))
    odd = [
        token
        for token in range(tokenizer.vocab_size)
        if isinstance(piece := tokenizer.piece(token), bytes) or not piece or token in tokenizer.special_ids
    ]
    return tokenizer, odd


def ids_of(kind: tuple[Tokenizer, list[int]], drawn: list[tuple[int, int]]) -> list[int]:
    """Tokens of any sort (0), odd ones (1), or the tokens of a text (2)."""
    tokenizer, odd = kind
    ids: list[int] = []
    for sort, number in drawn:
        match sort:
            case 0:
                ids.append(number % tokenizer.vocab_size)
            case 1:
                ids.append(odd[number % len(odd)])
            case _:
                ids += tokenizer.encode(TEXTS[number % len(TEXTS)][-4:], add_special_tokens=False)
    return ids


DRAWN = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6)), max_size=25)


@given(drawn=DRAWN, cuts=CUTS, skip=st.booleans())
def test_the_parts_add_up_and_none_breaks_a_character(
    kind: tuple[Tokenizer, list[int]], drawn: list[tuple[int, int]], cuts: list[int], skip: bool
) -> None:
    tokenizer, ids = kind[0], ids_of(kind, drawn)
    skipped = tokenizer.special_ids if skip else frozenset()
    for division in ([[token] for token in ids], pushes(ids, cuts)):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        bytes_so_far = getincrementaldecoder("utf-8")("replace")
        out = expected = ""
        for some in division:
            out += detokenizer.push(some)
            # All that is certain is told, and nothing else: what Python's own decoder makes of the bytes.
            data = b"".join(tokenizer.token_bytes(token) for token in some if token not in skipped)
            expected += bytes_so_far.decode(data)
            assert out == (expected.removeprefix(" ") if tokenizer.strips_leading_space else expected)
        assert out + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


@given(
    drawn=DRAWN,
    cuts=CUTS,
    stops=st.lists(st.sampled_from(STOPS) | st.text(min_size=1, max_size=3), min_size=1, max_size=5),
    within=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 6)), max_size=2),
)
def test_stop_strings_cut_the_text_at_the_first(
    kind: tuple[Tokenizer, list[int]],
    drawn: list[tuple[int, int]],
    cuts: list[int],
    stops: list[str],
    within: list[tuple[int, int]],
) -> None:
    """However the tokens come; some of the stop strings are parts of the text itself."""
    tokenizer, ids = kind[0], ids_of(kind, drawn)
    whole = tokenizer.decode(ids)
    stops += [part for at, length in within if (part := whole[at : at + length])]
    expected = first_stop(whole, stops)
    for division in ([[token] for token in ids], pushes(ids, cuts), [ids]):
        detokenizer = Detokenizer(tokenizer, stop=tuple(stops))
        out = ""
        for some in division:
            out += detokenizer.push(some)
            assert whole.startswith(out)
        out += detokenizer.finish()
        if expected is None:
            assert (out, detokenizer.stopped) == (whole, None)
        else:
            assert (out, detokenizer.stopped) == (whole[: expected[0]], expected[1])
