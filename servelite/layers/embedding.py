"""Token embedding: the table on the way in, and the head that scores the vocabulary on the way out.

Tensor-parallel ranks hold a range of the vocabulary each, of both.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from servelite.layers.build import Build
from servelite.layers.partition import vocabulary_share
from servelite.layers.weights import WeightSlot


class VocabEmbedding:
    """The table of token embeddings, [vocab_size, hidden_size], or the rank's rows of it."""

    def __init__(self, vocab_size: int, hidden_size: int, build: Build) -> None:
        self.group = build.group
        self.share = vocabulary_share(vocab_size, build.group.rank, build.group.size)
        self.weight = torch.empty((self.share.size, hidden_size), dtype=build.dtype)

    def weights(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self.weight, share=self.share)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Token IDs [tokens], int64 -> [tokens, hidden_size], the same on every rank."""
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        places = token_ids - self.share.start
        others = (places < 0) | (places >= self.share.size)
        rows = F.embedding(places.masked_fill_(others, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill_(others.unsqueeze(-1), 0.0))


class HeadNeed(enum.Enum):
    """What the sampler needs of the head."""

    ARG_MAX = enum.auto()  # every row is greedy and none is masked
    LOGITS = enum.auto()


@dataclass(frozen=True)
class HeadOutput:
    """What the head says of each row; `best` or `logits`, as was needed."""

    finite: Tensor  # bool [rows]: no logit is NaN or infinite
    best: Tensor | None = None  # int64 [rows]: the likeliest token, the lowest ID on a tie
    logits: Tensor | None = None  # float32 [rows, vocab_size]


class VocabHead:
    """Scores of the vocabulary from the last hidden states."""

    def __init__(self, embedding: VocabEmbedding) -> None:
        """`embedding`: its table is the head's weight; a model that ties them passes its own."""
        self._embedding = embedding

    def __call__(self, hidden: Tensor, need: HeadNeed) -> HeadOutput:
        """hidden: [rows, hidden_size], only rows whose next token is wanted. Every rank gets the same."""
        logits = F.linear(hidden, self._embedding.weight).float()
        alone = self._embedding.group.size == 1
        if need is HeadNeed.LOGITS and not alone:
            logits = self._gathered(logits)
        low, high = torch.aminmax(logits, dim=-1)
        finite = torch.isfinite(low) & torch.isfinite(high)
        if need is HeadNeed.LOGITS:
            return HeadOutput(finite, logits=logits)
        best = logits.argmax(dim=-1)
        return HeadOutput(finite, best=best) if alone else self._best_of_ranks(finite, high, best)

    def _gathered(self, logits: Tensor) -> Tensor:
        """Each rank's [rows, its tokens] -> [rows, vocab_size], contiguous: the sampler works in place."""
        group, vocab_size = self._embedding.group, self._embedding.share.whole
        width = -(-vocab_size // group.size)
        padded = F.pad(logits, (0, width - logits.shape[1])) if logits.shape[1] < width else logits
        return group.all_gather(padded)[:, :vocab_size].contiguous()

    def _best_of_ranks(self, finite: Tensor, value: Tensor, best: Tensor) -> HeadOutput:
        """`value`: float32 [rows], of `best`, both of the rank's own tokens. 12 bytes a row are exchanged."""
        share, group = self._embedding.share, self._embedding.group
        mine = torch.stack((value.view(torch.int32), (best + share.start).int(), finite.int()), dim=1)
        values, tokens, flags = group.all_gather(mine).view(len(best), group.size, 3).unbind(dim=2)
        # Of equal values the first is taken: ranks hold the vocabulary in order, so it is the lowest ID.
        first = values.view(torch.float32).argmax(dim=1, keepdim=True)
        return HeadOutput(flags.all(dim=1), best=tokens.gather(1, first).squeeze(1).long())
