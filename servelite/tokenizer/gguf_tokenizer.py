"""A `tokenizers.Tokenizer` from a GGUF file's metadata: byte-level BPE, or SentencePiece's pieces.

Of byte-level BPE, GGUF names the pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it, so each
name that can be read is a row of `PRE_TOKENIZERS`; any other is refused by name, since a wrong split
would give tokens the model was never trained on and nobody would notice.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from servelite.tokenizer.gguf import GGUFFile
from servelite.tokenizer.gguf_sentencepiece import (
    CONTROL,
    KINDS,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    build_sentencepiece,
    pieces_of,
)
from servelite.tokenizer.metadata_files import ModelFileError, brief


@dataclass(frozen=True)
class PreTokenizer:
    """How one `tokenizer.ggml.pre` splits text, and what goes with it."""

    make: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False  # the text is normalised to NFC first
    ignore_merges: bool = False  # a piece that is a whole token is one, whatever the merges say
    add_bos: bool = False  # where the file does not say


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """The cl100k-like split of Llama 3 and Qwen 2, which differ in how many digits go together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3: Final = PreTokenizer(_split(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Final[dict[str, PreTokenizer]] = {
    "gpt-2": PreTokenizer(_gpt2),
    "smollm": PreTokenizer(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer(_split(r"\p{N}"), nfc=True),
}


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Half a million merges are as many objects, none of them garbage: looking at them all again and
    again would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_collections()
def build_tokenizer(gguf: GGUFFile) -> Tokenizer:
    """The tokenizer that `gguf` describes, with its added tokens and BOS/EOS rule.

    Raises:
        ModelFileError: another kind of tokenizer, an unknown pre-tokenizer, or damaged lists.
    """
    kind = gguf.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _build_byte_level(gguf)
    if kind == "llama":
        return _build_pieces(gguf)
    raise ModelFileError(
        gguf.path,
        f"tokenizer.ggml.model is {brief(kind)}; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) can be "
        "read",
    )


def _build_pieces(gguf: GGUFFile) -> Tokenizer:
    pieces, kinds = pieces_of(_strings(gguf, "tokenizer.ggml.tokens"), _types(gguf))
    tokenizer = build_sentencepiece(gguf, pieces, kinds)
    _add_tokens(tokenizer, pieces, kinds)
    _set_post_processor(tokenizer, gguf, pieces, add_bos=True)
    return tokenizer


def _build_byte_level(gguf: GGUFFile) -> Tokenizer:
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelFileError(
            gguf.path, f"tokenizer.ggml.pre is {brief(name)}, not one of those known: {known}"
        )
    tokens = _strings(gguf, "tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelFileError(gguf.path, "tokenizer.ggml.tokens holds a token twice")
    tokenizer = Tokenizer(_bpe(gguf, vocab, pre))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.make()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, _types(gguf))
    _set_post_processor(tokenizer, gguf, tokens, add_bos=pre.add_bos)
    return tokenizer


def _strings(gguf: GGUFFile, key: str) -> list[str]:
    value = gguf.metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelFileError(gguf.path, f"metadata key {key!r} is absent or no list of strings")
    return value


def _bpe(gguf: GGUFFile, vocab: dict[str, int], pre: PreTokenizer) -> models.BPE:
    merges: list[tuple[str, str]] = []
    for merge in _strings(gguf, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")  # byte-level text holds no space
        if not space or not right:
            raise ModelFileError(gguf.path, f"tokenizer.ggml.merges holds {merge!r}, which is no pair")
        merges.append((left, right))
    try:
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises a bare Exception: a merge of an unknown token
        raise ModelFileError(gguf.path, f"tokenizer.ggml.merges does not fit the tokens ({error})") from None


def _types(gguf: GGUFFile) -> list[int]:
    """The type of each token; all normal where the file gives none."""
    count = len(gguf.metadata["tokenizer.ggml.tokens"])
    types = gguf.metadata.get("tokenizer.ggml.token_type", [NORMAL] * count)
    if not isinstance(types, list) or len(types) != count:
        raise ModelFileError(gguf.path, "tokenizer.ggml.token_type is not as long as tokenizer.ggml.tokens")
    # All of an array's elements are of one kind.
    if type(types[0]) is not int or not KINDS.issuperset(types):
        raise ModelFileError(
            gguf.path, f"tokenizer.ggml.token_type is {brief(types)}, no list of token types (0 to 6)"
        )
    return types


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens become special tokens, user-defined ones plain added tokens."""
    controls = (CONTROL, UNKNOWN)
    added = [
        AddedToken(token, special=kind in controls, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])


def _set_post_processor(tokenizer: Tokenizer, gguf: GGUFFile, tokens: list[str], *, add_bos: bool) -> None:
    """BOS before and EOS after a text encoded with its special tokens, where the file says so.

    `add_bos`: where the file says nothing.
    """
    template: list[str] = ["$A"]
    named: list[tuple[str, int]] = []
    for which, default in (("bos", add_bos), ("eos", False)):
        if not gguf.metadata.get(f"tokenizer.ggml.add_{which}_token", default):
            continue
        index: Any = gguf.metadata.get(f"tokenizer.ggml.{which}_token_id")
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise ModelFileError(
                gguf.path,
                f"tokenizer.ggml.add_{which}_token is set, but tokenizer.ggml.{which}_token_id is "
                f"{brief(index)}",
            )
        named.append((tokens[index], index))
        template = [tokens[index], *template] if which == "bos" else [*template, tokens[index]]
    if named:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
