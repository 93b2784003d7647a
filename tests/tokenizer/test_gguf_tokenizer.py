"""Tokenizers built from GGUF metadata: splits by name, added tokens, BOS and EOS, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servelite.tokenizer.gguf_tokenizer import PRE_TOKENIZERS
from servelite.tokenizer.model_files import ModelFileError, open_model_files
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.small_gguf import MERGES, TOKENS, TYPES, write_gguf


def load(path: Path, **changes: Any) -> Tokenizer:
    return load_tokenizer(open_model_files(write_gguf(path / "m.gguf", **changes)))


def pieces(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False, **options)
    return [tokenizer.decode([index], skip_special_tokens=False) for index in ids]


def splits(name: str, text: str) -> list[str]:
    """What the pre-tokenizer `name` makes of an ASCII text, spaces shown as themselves."""
    made = PRE_TOKENIZERS[name].make().pre_tokenize_str(text)
    return [part.replace("Ġ", " ").replace("Ċ", "\n") for part, _ in made]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["It", "'s", " 2024", ":", "\n\n", " x", " ", " 12345"]),
        ("smollm", ["It", "'s", " ", "2", "0", "2", "4", ":", "\n\n", " x", "  ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", ["It", "'s", " ", "202", "4", ":\n\n", " x", " ", " ", "123", "45"]),
        ("qwen2", ["It", "'s", " ", "2", "0", "2", "4", ":\n\n", " x", " ", " ", "1", "2", "3", "4", "5"]),
    ],
)
def test_each_pre_tokenizer_splits_as_its_models_do(name: str, expected: list[str]) -> None:
    assert splits(name, "It's 2024:\n\n x  12345") == expected


def test_merges_apply_and_digits_stand_alone(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert pieces(tokenizer, "hello he 12") == ["hello", " he", " ", "1", "2"]


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.special_tokens == ("<bos>", "<eos>")
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [2]
    assert tokenizer.encode("<eos>", add_special_tokens=False, parse_special=True) == [1]
    assert len(pieces(tokenizer, "<eos>")) == len("<eos>")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<bos>", "<eos>", (1,))
    assert tokenizer.vocab_size == len(TOKENS)


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({}, [], []),
        ({"tokenizer__ggml__add_bos_token": True}, [0], []),
        ({"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__add_eos_token": True}, [0], [1]),
        ({"tokenizer__ggml__pre": "llama-bpe"}, [0], []),
        ({"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__add_bos_token": False}, [], []),
    ],
)
def test_bos_and_eos_are_added_where_the_file_says(
    tmp_path: Path, changes: dict[str, Any], first: list[int], last: list[int]
) -> None:
    tokenizer = load(tmp_path, **changes)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello", add_special_tokens=True) == first + plain + last
    assert tokenizer.encode("", add_special_tokens=True) == first + last


def test_there_are_never_two_bos(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokenizer__ggml__add_bos_token=True)
    ids = tokenizer.encode("<bos>hello", add_special_tokens=True, parse_special=True)
    assert ids == [0, *tokenizer.encode("hello", add_special_tokens=False)]


def test_qwen2_text_is_normalised_and_smollm_text_is_not(tmp_path: Path) -> None:
    decomposed = "e\u0301"
    qwen = load(tmp_path, tokenizer__ggml__pre="qwen2")
    assert qwen.decode(qwen.encode(decomposed, add_special_tokens=False)) == "\u00e9"
    smollm = load(tmp_path)
    assert smollm.decode(smollm.encode(decomposed, add_special_tokens=False)) == decomposed


def test_llama_3_takes_a_whole_token_whatever_the_merges_say(tmp_path: Path) -> None:
    changes = {
        "tokenizer__ggml__tokens": [*TOKENS, "xyz"],
        "tokenizer__ggml__token_type": [*TYPES, 1],
    }
    files = write_gguf(tmp_path / "m.gguf", **changes, tokenizer__ggml__pre="llama-bpe")
    opened = open_model_files(files)
    opened.config["vocab_size"] = len(TOKENS) + 1
    assert pieces(load_tokenizer(opened), "xyz") == ["xyz"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model is 'bert'; 'gpt2' (byte-level BPE) and"),
        ({"tokenizer__ggml__pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', not one of those known: gpt-2"),
        ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre is 'default'"),
        ({"tokenizer__ggml__tokens": None}, "'tokenizer.ggml.tokens' is absent"),
        ({"tokenizer__ggml__merges": None}, "'tokenizer.ggml.merges' is absent"),
        ({"tokenizer__ggml__tokens": [*TOKENS[:-1], "he"]}, "holds a token twice"),
        ({"tokenizer__ggml__merges": [*MERGES, "nopair"]}, "holds 'nopair', which is no pair"),
        ({"tokenizer__ggml__merges": [*MERGES, "Q Z"]}, "does not fit the tokens"),
        ({"tokenizer__ggml__token_type": TYPES[:-1]}, "not as long as tokenizer.ggml.tokens"),
        (
            {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 9999},
            "'tokenizer.ggml.bos_token_id' is 9999, no token ID",
        ),
        ({"tokenizer__ggml__pre": ["smollm"]}, "tokenizer.ggml.pre is ['smollm'], not one of those known"),
        ({"tokenizer__ggml__token_type": [7] * len(TYPES)}, "tokenizer.ggml.token_type is [7, 7, 7"),
        ({"tokenizer__ggml__token_type": [-1] * len(TYPES)}, "tokenizer.ggml.token_type is [-1, -1"),
        ({"tokenizer__ggml__token_type": ["a"] * len(TYPES)}, "tokenizer.ggml.token_type is ['a', 'a'"),
    ],
)
def test_what_cannot_be_read_exactly_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        load(tmp_path, **changes)
    assert says in str(caught.value) and "\n" not in str(caught.value)
