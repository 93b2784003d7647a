"""SentencePiece's pieces in a GGUF file: merges by score, runs, bytes, the space in front, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servelite.tokenizer.detokenizer import Detokenizer
from servelite.tokenizer.model_files import ModelFileError, open_model_files
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.small_gguf import CONTROL, NORMAL, USER_DEFINED, write_gguf

UNKNOWN, BYTE = 2, 6
RUNS = ["\n", "\n\n", "\n\n\n", "  ", "   "]  # of spaces: as the converter writes them
WORDS = ["▁t", "he", "▁the", "▁", "t", "h", "e", "é"]
TOKENS = ["<unk>", "<s>", "</s>", "<unused0>", *RUNS, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
TYPES = [UNKNOWN, CONTROL, CONTROL, CONTROL, *[USER_DEFINED] * 5, *[BYTE] * 256, *[NORMAL] * len(WORDS)]
SCORES = [*[0.0] * (len(TOKENS) - len(WORDS)), *(-float(rank) for rank in range(len(WORDS)))]
FIRST_BYTE, FIRST_WORD = 4 + len(RUNS), 4 + len(RUNS) + 256


def load(path: Path, **changes: Any) -> Tokenizer:
    metadata = {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__pre": "default",
        "tokenizer__ggml__tokens": TOKENS,
        "tokenizer__ggml__token_type": TYPES,
        "tokenizer__ggml__scores": SCORES,
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__unknown_token_id": 0,
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__add_space_prefix": False,
    }
    files = open_model_files(write_gguf(path / "m.gguf", **(metadata | changes)))
    files.config["vocab_size"] = len(TOKENS)
    return load_tokenizer(files)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def word(text: str) -> int:
    return FIRST_WORD + WORDS.index(text)


def test_the_piece_of_the_highest_score_is_joined_first(tmp_path: Path) -> None:
    """ "▁t" comes before "he": "▁the" is joined of these two, and "th" is no piece."""
    tokenizer = load(tmp_path)
    assert encode(tokenizer, " the") == [word("▁the")]
    assert encode(tokenizer, "the") == [word("t"), word("he")]


def test_scores_decide_and_not_the_order_of_the_pieces(tmp_path: Path) -> None:
    scores = list(SCORES)
    scores[word("▁t")], scores[word("he")] = -9.0, -8.0  # below "▁the", and now "he" first
    scores[word("▁the")] = -20.0
    assert encode(load(tmp_path, tokenizer__ggml__scores=scores), " the") == [word("▁the")]


def test_a_run_is_its_longest_piece(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    newline = TOKENS.index("\n")
    assert encode(tokenizer, "\n" * 5) == [newline + 2, newline + 1]
    spaces = TOKENS.index("   ")
    assert encode(tokenizer, "     t") == [spaces, spaces - 1, word("t")]
    assert tokenizer.decode(encode(tokenizer, "     t")) == "     t"


def test_what_has_no_piece_is_bytes_and_comes_back(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    ids = encode(tokenizer, "é🎉")
    assert ids == [word("é"), *(FIRST_BYTE + byte for byte in "🎉".encode())]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([index]) for index in ids] == ["é", "", "", "", "🎉"]


def test_a_bytes_name_in_a_text_is_text(tmp_path: Path) -> None:
    ids = encode(load(tmp_path), "<0x0A>")
    assert ids == [FIRST_BYTE + byte for byte in b"<0x0A>"]


def test_a_spare_place_is_a_piece_and_no_control_token(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert encode(tokenizer, "<unused0>") == [3]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([3]) == "<unused0>"
    assert 1 not in encode(tokenizer, "<s>")


@pytest.mark.parametrize("changes", [{"tokenizer__ggml__add_space_prefix": True}, {}])
def test_the_space_in_front_is_put_and_taken_where_the_file_says(
    tmp_path: Path, changes: dict[str, bool]
) -> None:
    tokenizer = load(tmp_path, **changes)
    ids = encode(tokenizer, "the")
    assert ids == ([word("▁the")] if changes else [word("t"), word("he")])
    assert tokenizer.decode(ids) == "the"
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([index]) for index in ids) + detokenizer.finish() == "the"


def test_a_file_that_says_nothing_has_bos_and_the_space(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokenizer__ggml__add_space_prefix=None)
    assert tokenizer.encode("the", add_special_tokens=True) == [1, word("▁the")]
    tokenizer = load(tmp_path, tokenizer__ggml__add_bos_token=False)
    assert tokenizer.encode("the", add_special_tokens=True) == [word("t"), word("he")]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer__ggml__scores": SCORES[:-1]}, "tokenizer.ggml.scores is absent or not as long"),
        ({"tokenizer__ggml__scores": None}, "tokenizer.ggml.scores is absent or not as long"),
        ({"tokenizer__ggml__token_type": TYPES[:-1]}, "token_type is not as long"),
        ({"tokenizer__ggml__unknown_token_id": 9999}, "tokenizer.ggml.unknown_token_id is 9999"),
        ({"tokenizer__ggml__tokens": [*TOKENS[:-1], "he"]}, "holds a token twice"),
        ({"tokenizer__ggml__scores": ["a"] * len(SCORES)}, "tokenizer.ggml.scores is ['a', 'a'"),
        ({"tokenizer__ggml__scores": [float("nan")] * len(SCORES)}, "tokenizer.ggml.scores is [nan, nan"),
        ({"tokenizer__ggml__tokens": [*TOKENS[:-1], "a" * 1025]}, "of 1025 characters, above the limit"),
    ],
)
def test_what_cannot_be_read_exactly_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        load(tmp_path, **changes)
    assert says in str(caught.value) and "\n" not in str(caught.value)
