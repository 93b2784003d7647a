"""A `tokenizers.Tokenizer` from a GGUF file's metadata.

GGUF names the pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it, so each name that can be
read is a row of `PRE_TOKENIZERS`; any other is refused by name, since a wrong split would give tokens
the model was never trained on and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from servelite.tokenizer.gguf import GGUFFile, ModelFileError

# Values of tokenizer.ggml.token_type.
_CONTROL: Final = 3
_USER_DEFINED: Final = 4


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


def build_tokenizer(gguf: GGUFFile) -> Tokenizer:
    """The tokenizer that `gguf` describes: byte-level BPE with its added tokens and BOS/EOS rule.

    Raises:
        ModelFileError: another kind of tokenizer, an unknown pre-tokenizer, or damaged lists.
    """
    kind = gguf.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelFileError(
            gguf.path, f"tokenizer.ggml.model is {kind!r}; only byte-level BPE ('gpt2') can be read"
        )
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelFileError(gguf.path, f"tokenizer.ggml.pre is {name!r}, not one of those known: {known}")
    tokens = _strings(gguf, "tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelFileError(gguf.path, "tokenizer.ggml.tokens holds a token twice")
    tokenizer = Tokenizer(_bpe(gguf, vocab, pre))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.make()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, gguf, tokens)
    _set_post_processor(tokenizer, gguf, tokens, pre)
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


def _add_tokens(tokenizer: Tokenizer, gguf: GGUFFile, tokens: list[str]) -> None:
    """Control tokens become special tokens, user-defined ones plain added tokens."""
    types = gguf.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list) or (types and len(types) != len(tokens)):
        raise ModelFileError(gguf.path, "tokenizer.ggml.token_type is not as long as tokenizer.ggml.tokens")
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])


def _set_post_processor(tokenizer: Tokenizer, gguf: GGUFFile, tokens: list[str], pre: PreTokenizer) -> None:
    """BOS before and EOS after a text encoded with its special tokens, where the file says so."""
    template: list[str] = ["$A"]
    named: list[tuple[str, int]] = []
    for which, default in (("bos", pre.add_bos), ("eos", False)):
        if not gguf.metadata.get(f"tokenizer.ggml.add_{which}_token", default):
            continue
        index: Any = gguf.metadata.get(f"tokenizer.ggml.{which}_token_id")
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise ModelFileError(
                gguf.path,
                f"tokenizer.ggml.add_{which}_token is set, but tokenizer.ggml.{which}_token_id is {index!r}",
            )
        named.append((tokens[index], index))
        template = [tokens[index], *template] if which == "bos" else [*template, tokens[index]]
    if named:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
