"""What changes or forbids tokens before a draw: bias, penalties, and masks of single tokens.

In this order: `logit_bias`; the penalties (repetition over prompt and output tokens, as Hugging Face
defines it; then frequency and presence over output tokens, as OpenAI does); `allowed_token_ids`,
`min_tokens` (no stop token before that many output tokens) and `bad_words`. A grammar's mask commutes
with the last three. All is a function of the row's parameters and of the tokens it has, so a row
preempted or resumed goes on as it would have. Where nothing is left allowed, every logit is -inf and
the arg max takes token 0: contradicting parameters are no damage, and the row is not flagged.

A row that uses none of this costs nothing, and no row's result depends on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servelite.ipc.messages import SamplingParams
from servelite.worker.token_counts import TokenCounts

_Ints = npt.NDArray[np.int32]
_Longs = npt.NDArray[np.int64]

_ANY = -1  # in `_BadWords.starts`: any token, or none
_NONE = -2  # a place before a row's first token


@dataclass(frozen=True)
class _BadWords:
    """Token sequences whose last token is forbidden where the tokens before it stand already."""

    starts: _Ints  # [sequences, longest - 1], right-aligned, filled up with _ANY
    last: _Longs  # [sequences]

    def forbidden(self, tokens: _Ints) -> _Longs:
        """The tokens that would complete a sequence after `tokens` (prompt and output)."""
        width = self.starts.shape[1]
        tail = tokens[max(0, len(tokens) - width) :]
        tail = np.concatenate((np.full(width - len(tail), _NONE, np.int32), tail))
        return self.last[((self.starts == tail) | (self.starts == _ANY)).all(axis=1)]


@dataclass(frozen=True)
class _Rules:
    """What one row asks for, token IDs as arrays."""

    bias_ids: _Longs
    bias: npt.NDArray[np.float32]
    repetition: float
    frequency: float
    presence: float
    allowed: _Longs | None  # None: all
    min_tokens: int
    stops: _Longs
    bad_words: _BadWords | None

    @property
    def penalises(self) -> bool:
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0


class LogitsProcessors:
    """The rules of each row, and the token counts of those with penalties."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rules: list[_Rules | None] = [None] * rows
        self._ruled = np.zeros(rows, np.bool_)
        self._counts = TokenCounts(rows, vocab_size)

    def occupy(self, row: int, sampling: SamplingParams, tokens: _Ints, prompt_len: int) -> None:
        """A request takes the row, with the tokens it has so far."""
        rules = self._rules[row] = self._rules_of(sampling)
        self._ruled[row] = rules is not None
        if rules is not None and rules.penalises:
            self._counts.rebuild(row, tokens[:prompt_len], tokens[prompt_len:])
        else:
            self._counts.drop(row)

    def add(self, rows: _Ints, tokens: _Longs) -> None:
        """Each of `rows` got one of `tokens`."""
        self._counts.add(rows, tokens)

    def used_by(self, rows: _Ints) -> bool:
        """Whether `apply` would change anything for some of `rows`."""
        return bool(self._ruled[rows].any())

    def apply(self, logits: Tensor, rows: _Ints, tokens: _Ints, lengths: _Longs, prompt_lens: _Longs) -> None:
        """Change `logits` in place.

        Args:
            logits: float32 [rows, vocabulary].
            tokens: [resident rows, any], of which the first lengths[i] of row rows[i] are its own.
            prompt_lens: how many of those are its prompt.
        """
        at = np.flatnonzero(self._ruled[rows])
        rules = [rule for row in rows[at].tolist() if (rule := self._rules[row]) is not None]
        if where := _places(at, [rule.bias_ids for rule in rules]):
            bias = torch.from_numpy(np.concatenate([rule.bias for rule in rules]))
            logits.index_put_(where, bias, accumulate=True)
        self._penalise(logits, at, rows, rules)
        self._keep_allowed(logits, at, rules)
        forbidden = [
            np.concatenate(
                (
                    rule.stops if lengths[i] - prompt_lens[i] < rule.min_tokens else rule.stops[:0],
                    rule.bad_words.forbidden(tokens[rows[i], : lengths[i]]) if rule.bad_words else _NO_IDS,
                )
            )
            for i, rule in zip(at.tolist(), rules, strict=True)
        ]
        if where := _places(at, forbidden):
            logits[where] = -torch.inf

    def _penalise(self, logits: Tensor, at: _Longs, rows: _Ints, rules: Sequence[_Rules]) -> None:
        chosen = [(i, rule) for i, rule in zip(at.tolist(), rules, strict=True) if rule.penalises]
        if not chosen:
            return
        places = torch.tensor([i for i, _ in chosen])
        lines = self._counts.lines(rows[places.numpy()])
        repetition, frequency, presence = (
            torch.tensor([getattr(rule, name) for _, rule in chosen], dtype=torch.float32)[:, None]
            for name in ("repetition", "frequency", "presence")
        )
        part = logits[places]
        if bool((repetition != 1).any()):
            repeated = torch.where(part > 0, part / repetition, part * repetition)
            part = torch.where(self._counts.seen[lines], repeated, part)
        if bool((frequency != 0).any() or (presence != 0).any()):
            output = self._counts.output[lines]
            part.sub_(output * frequency).sub_((output > 0) * presence)
        logits[places] = part

    def _keep_allowed(self, logits: Tensor, at: _Longs, rules: Sequence[_Rules]) -> None:
        limited = [
            (i, rule.allowed) for i, rule in zip(at.tolist(), rules, strict=True) if rule.allowed is not None
        ]
        if not limited:
            return
        places = np.array([i for i, _ in limited])
        kept = torch.full((len(limited), logits.shape[1]), -torch.inf)
        if where := _places(np.arange(len(limited)), [ids for _, ids in limited]):
            kept[where] = logits[torch.from_numpy(places)[where[0]], where[1]]
        logits[torch.from_numpy(places)] = kept

    def _rules_of(self, sampling: SamplingParams) -> _Rules | None:
        bias = [(token, value) for token, value in sampling.logit_bias if 0 <= token < self._vocab_size]
        rules = _Rules(
            bias_ids=np.array([token for token, _ in bias], np.int64),
            bias=np.array([value for _, value in bias], np.float32),
            repetition=sampling.repetition_penalty,
            frequency=sampling.frequency_penalty,
            presence=sampling.presence_penalty,
            allowed=self._inside(sampling.allowed_token_ids) if sampling.allowed_token_ids else None,
            min_tokens=sampling.min_tokens,
            stops=self._inside(sampling.stop_token_ids),
            bad_words=self._bad_words(sampling.bad_words),
        )
        masked = rules.allowed is not None or rules.bad_words or (rules.min_tokens and len(rules.stops))
        return rules if masked or len(bias) or rules.penalises else None

    def _inside(self, ids: Sequence[int]) -> _Longs:
        """Those of `ids` that are in the model's vocabulary: a tokenizer may know more tokens."""
        array = np.array(ids, np.int64)
        return array[(array >= 0) & (array < self._vocab_size)]

    def _bad_words(self, words: Sequence[Sequence[int]]) -> _BadWords | None:
        words = [word for word in words if len(word) and len(self._inside(word)) == len(word)]
        if not words:
            return None
        starts = np.full((len(words), max(map(len, words)) - 1), _ANY, np.int32)
        for line, word in zip(starts, words, strict=True):
            line[len(line) - len(word) + 1 :] = word[:-1]
        return _BadWords(starts, np.array([word[-1] for word in words]))


_NO_IDS: _Longs = np.empty(0, np.int64)


def _places(at: _Longs, ids: Sequence[_Longs]) -> tuple[Tensor, Tensor] | None:
    """Indices of the logits of ids[i] in row at[i]; None where there are none."""
    lengths = [len(part) for part in ids]
    if not any(lengths):
        return None
    return torch.from_numpy(np.repeat(at, lengths)), torch.from_numpy(np.concatenate(ids))
