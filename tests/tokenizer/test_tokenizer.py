"""The tokenizer's interface, on the demo model and on tokenizers of Hugging Face folders."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from servelite.tokenizer.model_files import ModelFileError, open_model_files
from servelite.tokenizer.tokenizer import InvalidTextError, Tokenizer, load_tokenizer
from tests.tokenizer.small_folder import save, sentencepiece
from tests.tokenizer.texts import TEXTS

START, END = 1, 2  # <|im_start|>, <|im_end|> of the demo model


def byte_level(*added: AddedToken) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])
    return backend


def test_the_demo_models_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49_152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (START, (END,))
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.encode("Hello world! 123", add_special_tokens=True) == [
        *(19556, 905, 17, 216, 33, 34, 35)
    ]


# The demo model has no token for these bytes, nor for the first byte of what lies above U+3FFFF.
LACKING = "\x04\x06\x13\x14\x16\x1d"


@given(text=st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters=LACKING)))
def test_text_survives_whatever_it_is(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.special_ids.intersection(ids)


@given(ids=st.lists(st.integers(0, 49_151) | st.integers(0, 300), max_size=30), skip=st.booleans())
def test_decoding_is_that_of_the_tokenizers_library(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    theirs = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs


def test_every_tokens_bytes_are_its_entry_in_the_vocabulary(tokenizer: Tokenizer) -> None:
    for index in range(tokenizer.vocab_size):
        text = tokenizer._backend.decode([index], skip_special_tokens=False)
        assert tokenizer.token_bytes(index).decode(errors="replace") == text


def test_ids_outside_the_vocabulary_add_nothing(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(index) for index in (-1, 49_152, 1 << 40)] == [b"", b"", b""]
    assert tokenizer.decode([-1, 19556, 49_152]) == "Hello"


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidTextError, match=re.escape(r"half of a surrogate pair ('\ud83d')")):
        tokenizer.encode("ab\ud83d", add_special_tokens=True)
    with pytest.raises(InvalidTextError, match="half of a surrogate pair"):
        tokenizer.encode_rendered("\udc00", [])


def test_a_clone_is_equal(tokenizer: Tokenizer) -> None:
    clone = tokenizer.clone()
    text = "naïve <|im_end|> 42"
    assert clone.encode(text, add_special_tokens=True) == tokenizer.encode(text, add_special_tokens=True)
    for name in ("vocab_size", "special_ids", "bos_token_id", "eos_token_ids", "bos_token", "eos_token"):
        assert getattr(clone, name) == getattr(tokenizer, name)


def test_threads_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    """Plain and special encoding at once, and the same pieces filled from all threads."""
    text = "".join(TEXTS) + "<|im_end|>"
    plain = tokenizer.encode(text, add_special_tokens=False)
    special = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert END not in plain and special[-1] == END

    def work(number: int) -> bool:
        own = tokenizer.clone()
        ids = own.encode(text, add_special_tokens=False, parse_special=number % 2 == 1)
        return ids == (special if number % 2 else plain) and own.decode(plain) == text

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def test_a_rendered_chat_is_cut_at_the_templates_control_tokens_alone(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nHi <|im_end|> there<|im_end|>\n"
    spans = [(0, 12), (36, 46)]
    assert [text[first:last] for first, last in spans] == ["<|im_start|>", "<|im_end|>"]
    middle = tokenizer.encode("user\nHi <|im_end|> there", add_special_tokens=False)
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert END not in middle
    assert tokenizer.encode_rendered(text, spans) == [START, *middle, END, *newline]


def library_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """What the tokenizers library makes of `text` when it looks for control tokens by itself."""
    theirs = Backend.from_str(tokenizer._backend.to_str())
    theirs.encode_special_tokens = False
    return theirs.encode(text, add_special_tokens=False).ids


def test_where_all_control_tokens_are_the_templates_the_library_agrees(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n<|im_end|><|im_end|>"
    spans = [match.span() for match in re.finditer(r"<\|im_(start|end)\|>", text)]
    expected = library_ids(tokenizer, text)
    assert tokenizer.encode_rendered(text, spans) == expected
    assert tokenizer.encode(text, add_special_tokens=False, parse_special=True) == expected


@pytest.mark.parametrize("spans", [[(0, 3)], [(12, 12)], [(17, 27), (0, 12)]])
def test_a_span_without_a_control_token_is_refused(
    tokenizer: Tokenizer, spans: list[tuple[int, int]]
) -> None:
    with pytest.raises(ValueError, match="are no control token"):
        tokenizer.encode_rendered("<|im_start|>user\n<|im_end|>", spans)


def test_control_tokens_that_strip_do_so_in_a_cut_chat_too(tmp_path: Path) -> None:
    left = AddedToken("<l>", special=True, lstrip=True, normalized=False)
    right = AddedToken("<r>", special=True, rstrip=True, normalized=False)
    tokenizer = load_tokenizer(open_model_files(save(tmp_path, byte_level(left, right))))
    text = "a  <l>  b<r> \n c"
    whole = library_ids(tokenizer, text)
    assert tokenizer.encode(text, add_special_tokens=False, parse_special=True) == whole
    assert tokenizer.decode(whole, skip_special_tokens=False) == "a<l>  b<r>c"
    forged = text + "<l>"
    ids = tokenizer.encode_rendered(forged, [(3, 6), (9, 12)])
    assert ids == [*whole, *tokenizer.encode("<l>", add_special_tokens=False)]


def test_a_sentencepiece_tokenizer_from_a_folder(tmp_path: Path) -> None:
    backend = sentencepiece()
    path = save(tmp_path, backend, bos_token="<s>", eos_token={"content": "</s>"})
    tokenizer = load_tokenizer(open_model_files(path))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<s>", "</s>", (2,))
    ids = tokenizer.encode("hi é", add_special_tokens=True)
    assert ids == backend.encode("hi é").ids and ids[0] == 1
    assert tokenizer.decode(ids) == "hi é"
    assert tokenizer.token_bytes(ids[-1]) == b"\xa9"
    assert tokenizer.encode("</s>", add_special_tokens=False)[-1] != 2


@given(ids=st.lists(st.integers(0, 263), max_size=12), skip=st.booleans())
def test_sentencepiece_decoding_is_that_of_the_tokenizers_library(
    spm: Tokenizer, ids: list[int], skip: bool
) -> None:
    """Except that theirs writes a U+FFFD for each byte of a broken run, ours for each broken part."""
    theirs = spm._backend.decode(ids, skip_special_tokens=skip)
    ours = spm.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in theirs:
        assert ours == theirs


def test_the_demo_models_text_path_needs_neither_torch_nor_transformers(demo_model: Path) -> None:
    code = f"""
import sys
from servelite.tokenizer.chat_template import ChatTemplate
from servelite.tokenizer.detokenizer import Detokenizer
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import load_tokenizer
tokenizer = load_tokenizer(open_model_files({str(demo_model)!r}))
print(Detokenizer(tokenizer).push(tokenizer.encode("fine", add_special_tokens=True)))
print([name for name in ("torch", "transformers", "gguf") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "fine\n[]\n"


def test_truncation_and_padding_of_a_file_are_not_taken(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = load_tokenizer(open_model_files(save(tmp_path, backend)))
    assert len(tokenizer.encode("abcdef", add_special_tokens=True)) == 6


def test_a_token_that_the_model_lacks_is_refused_where_it_comes_up(tmp_path: Path) -> None:
    """As in Gemma 3, whose tokenizer has an image token that its text models have no row for."""
    path = save(tmp_path, byte_level(AddedToken("<image>", normalized=False)), vocab_size=256)
    tokenizer = load_tokenizer(open_model_files(path))
    assert tokenizer.vocab_size == 256 and tokenizer.token_bytes(256) == b""
    assert len(tokenizer.encode("image", add_special_tokens=False)) == 5
    for either in (tokenizer, tokenizer.clone()):
        with pytest.raises(InvalidTextError, match="the model has no token for '<image>'"):
            either.encode("an <image>", add_special_tokens=False)


def test_a_space_that_begins_the_text_is_not_put_after_a_control_token(tmp_path: Path) -> None:
    backend = sentencepiece()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = load_tokenizer(open_model_files(save(tmp_path, backend)))
    text = "hi<s>hi hi</s>hi"
    whole = library_ids(tokenizer, text)
    assert tokenizer.encode_rendered(text, [(2, 5), (10, 14)]) == whole
    forged = tokenizer.encode_rendered(text + "<s>", [(2, 5), (10, 14)])
    assert forged[: len(whole)] == whole and tokenizer.decode(forged) == "hihi hihi<s>"
    assert tokenizer.encode(text, add_special_tokens=False, parse_special=True) == whole


def test_a_non_ascii_added_token_decodes_to_itself(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        open_model_files(save(tmp_path, byte_level(AddedToken("é", normalized=False))))
    )
    assert tokenizer.decode(tokenizer.encode("aéb", add_special_tokens=False)) == "aéb"


def test_a_damaged_tokenizer_json_is_named(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: damaged"):
        load_tokenizer(open_model_files(tmp_path))


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.CTC()
    with pytest.raises(ModelFileError, match="decoder is CTC"):
        load_tokenizer(open_model_files(save(tmp_path, backend)))


def test_without_a_tokenizer_json_transformers_is_asked(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json, and transformers") as caught:
        load_tokenizer(open_model_files(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def known_bytes(tokenizer: Tokenizer) -> set[int]:
    """The bytes that the demo's vocabulary has a token for; the others vanish, as in transformers."""
    return {byte for token in range(tokenizer.vocab_size) for byte in tokenizer.token_bytes(token)}


@given(text=st.one_of(st.text(max_size=200), st.sampled_from(TEXTS)))
def test_a_text_is_never_larger_than_its_tokens_may_be(
    tokenizer: Tokenizer, known_bytes: set[int], text: str
) -> None:
    assume(set(text.encode()) <= known_bytes)
    most = tokenizer.most_bytes(len(tokenizer.encode(text, add_special_tokens=False)))
    assert len(text.encode()) <= (most or 0)


def test_the_bound_on_a_texts_size_is_a_token_of_the_vocabulary(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.most_bytes(1000) == 1000 * max(map(len, map(tokenizer.token_bytes, range(49152))))
    spaces = load_tokenizer(open_model_files(save(tmp_path / "spm", sentencepiece())))
    assert spaces.most_bytes(2) == 2 * len("<unk>")


@pytest.mark.parametrize("loss", ["strip", "collapse", "split", "unknown"])
def test_a_tokenizer_that_drops_text_has_no_such_bound(tmp_path: Path, loss: str) -> None:
    backend = sentencepiece()
    if loss == "strip":
        backend.normalizer = normalizers.Strip()
    elif loss == "collapse":
        backend.normalizer = normalizers.Replace("  ", " ")
    elif loss == "split":
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        backend.model = models.BPE(
            vocab=backend.get_vocab(with_added_tokens=False), merges=[], unk_token="<unk>", fuse_unk=True
        )
    assert load_tokenizer(open_model_files(save(tmp_path / "m", backend))).most_bytes(1000) is None
