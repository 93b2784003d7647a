"""Which bytes each token adds to a text, for the three families of decoders that text models use.

Byte-level BPE writes each byte as one printable character (GPT-2's table). SentencePiece-like
vocabularies write a space as U+2581 and a byte without a token of its own as `<0xNN>`. WordPiece marks
what continues a word, and there is a space before all else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

_SPACE: Final = "\u2581"
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table, character -> byte: printable Latin-1 stands for itself, the rest for U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


BYTE_ALPHABET: Final = _byte_alphabet()


class UnknownTokenizer(ValueError):
    """A tokenizer of a kind that cannot be used here: its tokens are not bytes one by one."""


@dataclass(frozen=True)
class PieceDecoder:
    """How a vocabulary's pieces become bytes."""

    byte_level: bool
    byte_fallback: bool = False
    strip_leading_space: bool = False  # a text's first character, when it is a space, is dropped
    continuation: str = ""  # WordPiece's mark

    def piece_bytes(self, piece: str, *, added: bool, special: bool) -> bytes:
        """The bytes of one token; `added` tokens hold plain text in byte-level vocabularies."""
        if self.byte_level:
            if added:
                return piece.encode()
            try:
                return bytes([BYTE_ALPHABET[character] for character in piece])
            except KeyError:
                return piece.encode()
        if self.continuation:
            within = piece.removeprefix(self.continuation)
            return (within if within != piece else f" {piece}").encode()
        if special:
            return piece.encode()
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE, " ").encode()


def piece_decoder(tokenizer: Tokenizer) -> PieceDecoder:
    """The decoder of `tokenizer`, read from its own description.

    Raises:
        UnknownTokenizer: it is none of byte-level, Metaspace, WordPiece, or SentencePiece's sequence.
    """
    if tokenizer.decoder is None:
        raise UnknownTokenizer("the tokenizer has no decoder")
    steps = _flatten(json.loads(tokenizer.decoder.__getstate__()))
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return PieceDecoder(byte_level=True)
    if kinds == {"WordPiece"}:
        return PieceDecoder(byte_level=False, strip_leading_space=True, continuation=steps[0]["prefix"])
    if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise UnknownTokenizer(f"the tokenizer's decoder is {'+'.join(step['type'] for step in steps)}")
    strip = False
    for step in steps:
        if step["type"] == "Replace" and (step["pattern"], step["content"]) != ({"String": _SPACE}, " "):
            raise UnknownTokenizer(f"the tokenizer's decoder replaces {step['pattern']}")
        if step["type"] == "Strip":
            if (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
                raise UnknownTokenizer(f"the tokenizer's decoder strips {step}")
            strip = True
        if step["type"] == "Metaspace":
            if step["replacement"] != _SPACE:
                raise UnknownTokenizer(f"the tokenizer's decoder writes a space as {step['replacement']!r}")
            strip = step.get("prepend_scheme", "always") != "never"
    return PieceDecoder(byte_level=False, byte_fallback="ByteFallback" in kinds, strip_leading_space=strip)


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for one in step["decoders"] for inner in _flatten(one)]
