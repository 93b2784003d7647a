"""A vocabulary of single bytes, with the control tokens of a tokenizer where that has them.

A grammar is right or wrong for it as for the tokenizer's own, and it is read in a ninth of the time or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from servelite.tokenizer.tokenizer import Tokenizer


class ByteVocabulary(msgspec.Struct, frozen=True):
    """Fulfils `Vocabulary`; travels."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]
    words: dict[int, bytes]
    """Control tokens and bytes, at most as many as have a place; what is not here is no text."""
    special_tokens: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ByteVocabulary:
        """As large as the tokenizer's; one with no room for all bytes is taken whole."""
        size = tokenizer.vocab_size
        control = tokenizer.special_ids.union(tokenizer.eos_token_ids)
        special = frozenset(token for token in control if token < size)
        if size - len(special) < 256:
            words = {token: tokenizer.token_bytes(token) for token in range(size)}
        else:
            words = {token: tokenizer.token_bytes(token) for token in special}
            free = (token for token in range(size) if token not in special)
            words |= {token: bytes((byte,)) for byte, token in enumerate(islice(free, 256))}
        return cls(size, tokenizer.bos_token_id, tokenizer.eos_token_ids, special, words)

    def token_bytes(self, token_id: int) -> bytes:
        """As `Tokenizer.token_bytes`."""
        return self.words.get(token_id, b"")

    def encode_rendered(self, text: str, controls: Sequence[tuple[int, int]]) -> list[int]:
        """Nothing: there is but one way to write a text in bytes, and who asks knows it."""
        return []
