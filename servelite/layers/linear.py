"""Linear layers, named for how they would be split over tensor-parallel ranks.

Column: the output features are split, a bias with them. Row: the input features are, and the ranks' sums
are added: a bias belongs to that sum, once, and not to each rank's part. One rank holds them whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from servelite.layers.build import Build
from servelite.layers.weights import WeightSlot


class ColumnParallelLinear:
    """Several projections of one input, fused into one product."""

    def __init__(self, in_features: int, parts: dict[str, int], build: Build, *, bias: bool = False) -> None:
        """`parts`: each projection's name in the checkpoint and its output features, in output order."""
        self._parts = parts
        features = sum(parts.values())
        self.weight = torch.empty((features, in_features), dtype=build.dtype)
        self.bias = torch.empty(features, dtype=build.dtype) if bias else None

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        sizes = list(self._parts.values())
        for name, part in zip(self._parts, self.weight.split(sizes), strict=True):
            yield WeightSlot(f"{prefix}.{name}.weight", part)
        if self.bias is not None:
            for name, part in zip(self._parts, self.bias.split(sizes), strict=True):
                yield WeightSlot(f"{prefix}.{name}.bias", part)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, the parts' features side by side]."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear:
    """A projection back to the hidden size."""

    def __init__(self, in_features: int, out_features: int, build: Build, *, bias: bool = False) -> None:
        self.weight = torch.empty((out_features, in_features), dtype=build.dtype)
        self.bias = torch.empty(out_features, dtype=build.dtype) if bias else None

    def weights(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self.weight)
        if self.bias is not None:
            yield WeightSlot(f"{name}.bias", self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        return F.linear(x, self.weight, self.bias)
