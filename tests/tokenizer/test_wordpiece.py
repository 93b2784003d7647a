"""WordPiece, on a real encoder's tokenizer: its own tokens, from either of its files, and their texts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.texts import TEXTS

CLS, SEP = 101, 102


@pytest.fixture(scope="module")
def wordpiece(minilm_model: Path) -> Tokenizer:
    return load_tokenizer(open_model_files(minilm_model))


@pytest.fixture(scope="module")
def library(minilm_model: Path) -> Backend:
    """The same by the library alone, which leaves spaces as they are."""
    backend = Backend.from_file(str(minilm_model / "tokenizer.json"))
    backend.no_padding()
    backend.no_truncation()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def test_tokens_are_the_librarys(wordpiece: Tokenizer, library: Backend) -> None:
    for text in TEXTS:
        assert wordpiece.encode(text, add_special_tokens=True) == library.encode(text).ids, text
    assert wordpiece.encode("Hello", add_special_tokens=True) == [CLS, 7592, SEP]
    assert SEP not in wordpiece.encode("a [SEP] b", add_special_tokens=False)  # from users it is text


def test_a_folder_with_a_vocabulary_alone(minilm_model: Path, wordpiece: Tokenizer, tmp_path: Path) -> None:
    for name in ("config.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(minilm_model / name, tmp_path)
    other = load_tokenizer(open_model_files(tmp_path))
    for text in TEXTS:
        assert other.encode(text, add_special_tokens=True) == wordpiece.encode(text, add_special_tokens=True)


@given(ids=st.lists(st.integers(0, 30_521), max_size=30), skip=st.booleans())
def test_decoding_is_the_librarys(wordpiece: Tokenizer, library: Backend, ids: list[int], skip: bool) -> None:
    ids = [
        7592,
        *ids,
    ]  # the library leaves the mark of what goes on at a text's beginning, where nothing does
    assert wordpiece.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)
