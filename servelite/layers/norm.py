"""Normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from servelite.layers.build import Build
from servelite.layers.weights import WeightSlot


class RMSNorm:
    """Root mean square normalisation (arXiv 1910.07467); computed in float32 whatever the model's type."""

    def __init__(self, size: int, eps: float, build: Build, *, offset: float = 0.0) -> None:
        """`offset`: added to the checkpoint's weight; Gemma's are stored as their distance from 1."""
        self.weight = torch.empty(size, dtype=torch.float32)
        self._eps, self._offset = eps, offset
        self._kernels = build.kernels

    def weights(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self.weight, self._offset)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> the same, in x's type."""
        return self._kernels.rms_norm(x, self.weight, self._eps)


class LayerNorm:
    """Layer normalisation (arXiv 1607.06450); computed in float32 whatever the model's type."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight, self.bias = (torch.empty(size, dtype=torch.float32) for _ in range(2))
        self._eps = eps

    def weights(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self.weight)
        yield WeightSlot(f"{name}.bias", self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> the same, in x's type."""
        return F.layer_norm(x.float(), x.shape[-1:], self.weight, self.bias, self._eps).to(x.dtype)
