"""Grammars that an answer must follow: compiled against a vocabulary, then followed token by token.

All that the rest knows of the library behind it (llguidance) is four calls: `Grammars.compile`, and
`Matcher.fill`, `accept` and `over`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, Protocol

import llguidance
import numpy as np
import numpy.typing as npt

from servelite.tokenizer.grammar_text import JSON_OPTIONS, GrammarKind
from servelite.tokenizer.tokenizer import InvalidTextError

_LIMITS: Final = llguidance.LLParserLimits(
    max_items_in_row=10_000, step_max_items=200_000, verbose_errors=False
)
"""The library's own, but for two: a thousand properties that may be left out are 4,000 items in a row, and
more than 50,000 in a mask."""


class GrammarError(ValueError):
    """A grammar that cannot be used, or an answer that it does not allow; one line."""


class GrammarLimitError(GrammarError):
    """An answer that the grammar may allow; finding out takes more than is allowed."""


class Matcher:
    """One answer's way through a grammar. Used by one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._end_ids = end_ids
        self._over = False

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self._end_ids

    @property
    def over(self) -> bool:
        """An end token was accepted: nothing may follow."""
        return self._over

    def fill(self, words: npt.NDArray[np.uint32]) -> None:
        """Write which tokens may come next: bit i of the little-endian words is token i, 1 allows.

        An end token may come where the grammar is complete. No bit at all: nothing may come.

        Args:
            words: contiguous; those beyond the vocabulary are left as they are.

        Raises:
            GrammarError: finding out takes more work than is allowed.
        """
        part = words[: self._num_words]
        self._matcher.unsafe_compute_mask_ptr(part.ctypes.data, part.nbytes)
        self._check()

    def accept(self, tokens: Sequence[int]) -> None:
        """The answer goes on with `tokens`.

        Raises:
            GrammarError: the grammar does not allow them.
            GrammarLimitError: whether it does is not found out.
        """
        for token in tokens:
            if self._over or not self._matcher.consume_token(token):
                if "lexer error" in (text := self._matcher.get_error()):
                    raise GrammarLimitError(_one_line(text))
                raise GrammarError(f"the grammar does not allow token {token} here")
            self._over = token in self._end_ids

    def copy(self) -> Matcher:
        """Another answer, which has come as far."""
        copy = Matcher(self._matcher.deep_copy(), self._num_words, self._end_ids)
        copy._over = self._over
        return copy

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_one_line(self._matcher.get_error()))


class Vocabulary(Protocol):
    """What a tokenizer has to tell for this; see `Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def special_tokens(self) -> tuple[str, ...]: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    def encode_rendered(self, text: str, controls: Sequence[tuple[int, int]], /) -> list[int]: ...


class Grammars:
    """What compiles grammars for one vocabulary. Threads may share it."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        """Raises `GrammarError`: the vocabulary has no end token.

        No other thread of the process runs while the library reads the vocabulary: 1 s for 262,000 tokens.
        """
        if not any(token < tokenizer.vocab_size for token in tokenizer.eos_token_ids):
            raise GrammarError("this model's tokenizer has no end token")
        words = _Words(tokenizer)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(words),
            n_vocab=tokenizer.vocab_size,
            eos_token=list(words.eos_token_ids),
        )
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._end_ids = frozenset(words.eos_token_ids)

    def compile(self, text: str) -> Matcher:
        """A matcher at the beginning of an answer. Other threads run meanwhile.

        Args:
            text: as `grammar_text` makes it.

        Raises:
            GrammarError: the grammar is invalid, contradicts itself, is too large, or allows no text.
        """
        try:
            source = _source(text)
        except (ValueError, KeyError, TypeError) as error:
            raise GrammarError(_one_line(str(error))) from None
        made = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        matcher = Matcher(made, self._num_words, self._end_ids)
        matcher._check()
        words = np.zeros(self._num_words, np.uint32)
        matcher.fill(words)  # the first mask is the dearest, and tells of grammars that lead nowhere
        for token in self._end_ids:
            words[token // 32] &= ~np.uint32(1 << token % 32)
        if not words.any():
            raise GrammarError("the grammar allows no text, or the empty one only")
        return matcher


class _Words:
    """A tokenizer as the library wants it."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        size = tokenizer.vocab_size
        self.eos_token_ids = tuple(token for token in tokenizer.eos_token_ids if token < size)
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        special = {token for token in tokenizer.special_ids if token < size}.union(self.eos_token_ids)
        self.special_token_ids = sorted(special)
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self._tokenizer = tokenizer
        self._control = min(tokenizer.special_tokens, default="")
        self._by_bytes = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, data: bytes) -> list[int]:
        """The tokens of a part of an answer that the grammar leaves no choice in.

        The tokenizer's own, as the model is used to them; where these do not spell it (a tokenizer may put
        a space before a text), the longest that fit, one after the other.
        """
        try:
            text, control = data.decode(), self._control
            # After a control token, as in the midst of an answer: a beginning may be written otherwise.
            ids = self._tokenizer.encode_rendered(control + text, [(0, len(control))] if control else [])
            ids = ids[1:] if control else ids
            if b"".join([self.tokens[token] for token in ids]) == data:
                return ids
        except (UnicodeDecodeError, InvalidTextError):
            pass
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                token = self._by_bytes.get(data[at:end])
                if token is not None:
                    ids.append(token)
                    at = end
                    break
            else:
                break  # no token has this byte
        return ids


def _source(text: str) -> str:
    """The grammar in the library's own form."""
    grammar = json.loads(text)
    kind, value = GrammarKind(grammar["kind"]), grammar.get("value")
    make = llguidance.LLMatcher
    match kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.LOOSE_SCHEMA:
            return make.grammar_from_json_schema(value, overrides=JSON_OPTIONS)
        case GrammarKind.JSON_OBJECT:
            return make.grammar_from_json_schema({"type": "object"}, overrides=JSON_OPTIONS)
        case GrammarKind.REGEX:
            return make.grammar_from_regex(value)
        case GrammarKind.CHOICE:
            return make.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
        case GrammarKind.LARK | GrammarKind.GRAMMAR:
            return make.grammar_from_lark(value)


def _one_line(text: str) -> str:
    """The library's words, in one line."""
    text = " ".join(text.removesuffix("<non-verbose/>").split())
    if "panicked at" in text or text.startswith("panic"):  # where its own code went wrong
        return "the grammar library cannot follow it"
    return "no text satisfies it" if text == "NoExtensionBias" else text[:300]
