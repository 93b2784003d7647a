"""Normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from servelite.kernels.dispatch import Kernels
from servelite.layers.weights import WeightSlot


class RMSNorm:
    """Root mean square normalisation (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        self.weight = torch.empty(size, dtype=torch.float32)
        self._eps = eps
        self._kernels = kernels

    def weights(self, name: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{name}.weight", self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, size] -> the same."""
        return self._kernels.rms_norm(x, self.weight, self._eps)
