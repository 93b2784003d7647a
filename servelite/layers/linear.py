"""Linear layers, named for how they are split over tensor-parallel ranks.

Column: the output features are split, a bias with them. Row: the input features are, and the ranks' sums
are added: a bias belongs to that sum, once, and not to each rank's part. One rank holds them whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from servelite.layers.build import Build
from servelite.layers.partition import Share
from servelite.layers.weights import WeightSlot


class ColumnParallelLinear:
    """Several projections of one input, fused into one product."""

    def __init__(
        self, in_features: int, parts: Mapping[str, Share], build: Build, *, bias: bool = False
    ) -> None:
        """`parts`: each projection's name in the checkpoint and the rank's output features of it, in output
        order."""
        self._parts = parts
        features = sum(share.size for share in parts.values())
        self.weight = torch.empty((features, in_features), dtype=build.dtype)
        self.bias = torch.empty(features, dtype=build.dtype) if bias else None

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        sizes = [share.size for share in self._parts.values()]
        for (name, share), part in zip(self._parts.items(), self.weight.split(sizes), strict=True):
            yield WeightSlot(f"{prefix}.{name}.weight", part, share=share)
        if self.bias is not None:
            for (name, share), part in zip(self._parts.items(), self.bias.split(sizes), strict=True):
                yield WeightSlot(f"{prefix}.{name}.bias", part, share=share)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, the rank's features of each part side by side]."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear:
    """A projection back to the hidden size."""

    def __init__(self, in_share: Share, out_features: int, build: Build, *, bias: bool = False) -> None:
        """`in_share`: the rank's input features."""
        self._share, self._group = in_share, build.group
        self.weight = torch.empty((out_features, in_share.size), dtype=build.dtype)
        self.bias = torch.empty(out_features, dtype=build.dtype) if bias else None

    def weights(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self.weight, share=self._share, dim=1)
        if self.bias is not None:
            yield WeightSlot(f"{name}.bias", self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, the rank's in_features] -> [tokens, out_features], the same on every rank."""
        if self._group.size == 1:
            return F.linear(x, self.weight, self.bias)
        out = self._group.all_reduce(F.linear(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)
