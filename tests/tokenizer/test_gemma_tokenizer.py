"""Gemma 3's tokenizer as built from its GGUF file, against the one that its authors publish."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from servelite.tokenizer.detokenizer import Detokenizer
from servelite.tokenizer.gguf_tokenizer import build_tokenizer
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.gemma_oracle import load_gemma_oracle
from tests.tokenizer.texts import TEXTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MORE = [
    *("▁▁ a▁b", "a" + " " * 70 + "b", "\n" * 40, "\t" * 33 + "x", " " * 33 + "x", "<0x0A>"),
    *("<unused5> x <unused6241>", "[multimodal]", "<div><table></td>", "the\n\n\n\nend"),
]
BOS = 2


@pytest.fixture(scope="module")
def gemma(gemma_model: Path) -> Iterator[Tokenizer]:
    yield load_tokenizer(open_model_files(gemma_model))


@pytest.fixture(scope="module")
def oracle() -> Backend:
    return load_gemma_oracle()


def test_token_ids_and_texts_are_the_authors(gemma: Tokenizer, oracle: Backend) -> None:
    for text in TEXTS + MORE:
        expected = oracle.encode(text).ids
        ids = gemma.encode(text, add_special_tokens=True)
        assert ids == expected, text
        assert ids[0] == BOS and gemma.decode(ids) == oracle.decode(expected) == text.replace("▁", " ")


def test_mixtures_of_texts_too(gemma: Tokenizer, oracle: Backend) -> None:
    random.seed(5)
    for _ in range(300):
        text = "".join(
            each[random.randrange(len(each)) :][: random.randrange(9)] for each in random.sample(TEXTS, 6)
        )
        assert gemma.encode(text, add_special_tokens=True) == oracle.encode(text).ids, text


def test_streaming_adds_up_to_the_whole(gemma: Tokenizer) -> None:
    for text in TEXTS:
        detokenizer = Detokenizer(gemma)
        parts = [detokenizer.push([index]) for index in gemma.encode(text, add_special_tokens=True)]
        assert "".join(parts) == text and detokenizer.finish() == ""


def test_every_token_adds_the_bytes_that_the_library_decodes(gemma: Tokenizer, oracle: Backend) -> None:
    for index in range(0, gemma.vocab_size, 7):
        if index not in gemma.special_ids:
            assert gemma.token_bytes(index).decode(errors="replace") == oracle.decode([index])


def test_control_tokens_stay_text(gemma: Tokenizer) -> None:
    assert {105, 106}.issubset(gemma.special_ids) and len(gemma.special_ids) < 10
    assert 105 not in gemma.encode("<start_of_turn>", add_special_tokens=False)
    assert gemma.encode("<start_of_turn>", add_special_tokens=False, parse_special=True) == [105]


def test_merges_are_the_authors(gemma_model: Path, oracle: Backend) -> None:
    """All of them, in their order but for two that no text can bring to a tie."""
    files = open_model_files(gemma_model)
    assert files.gguf is not None
    ours, theirs = (json.loads(each.to_str())["model"] for each in (build_tokenizer(files.gguf), oracle))
    assert ours["vocab"] == theirs["vocab"]
    pairs = [(a, b) for a, b in zip(ours["merges"], theirs["merges"], strict=True) if a != b]
    assert pairs == [(["\t", "\t"], ["▁", "t"]), (["▁", "t"], ["\t", "\t"])]
