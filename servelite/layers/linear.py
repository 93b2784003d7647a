"""Linear layers, named for how they would be split over tensor-parallel ranks.

Column: the output features are split. Row: the input features are. One rank holds them whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from servelite.layers.weights import WeightSlot


class ColumnParallelLinear:
    """Several projections of one input, fused into one product; no bias."""

    def __init__(self, in_features: int, parts: dict[str, int]) -> None:
        """`parts`: each projection's name in the checkpoint and its output features, in output order."""
        self._parts = parts
        self.weight = torch.empty((sum(parts.values()), in_features), dtype=torch.float32)

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        for (name, _), part in zip(
            self._parts.items(), self.weight.split(list(self._parts.values())), strict=True
        ):
            yield WeightSlot(f"{prefix}.{name}.weight", part)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, the parts' features side by side]."""
        return F.linear(x, self.weight)


class RowParallelLinear:
    """A projection back to the hidden size; no bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        self.weight = torch.empty((out_features, in_features), dtype=torch.float32)

    def weights(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        return F.linear(x, self.weight)
