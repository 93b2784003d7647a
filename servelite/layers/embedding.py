"""Token embedding: the table on the way in, and the head that scores the vocabulary on the way out."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from servelite.layers.weights import WeightSlot


class VocabEmbedding:
    """The table of token embeddings, [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.weight = torch.empty((vocab_size, hidden_size), dtype=dtype)

    def weights(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self.weight)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Token IDs [tokens], int64 -> [tokens, hidden_size]."""
        return F.embedding(token_ids, self.weight)


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
        """hidden: [rows, hidden_size], only rows whose next token is wanted."""
        logits = F.linear(hidden, self._embedding.weight).float()
        low, high = torch.aminmax(logits, dim=-1)
        finite = torch.isfinite(low) & torch.isfinite(high)
        if need is HeadNeed.ARG_MAX:
            return HeadOutput(finite, best=logits.argmax(dim=-1))
        return HeadOutput(finite, logits=logits)
