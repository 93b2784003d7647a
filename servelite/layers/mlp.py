"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from servelite.kernels.dispatch import Kernels
from servelite.layers.linear import ColumnParallelLinear, RowParallelLinear
from servelite.layers.weights import WeightSlot


class GatedMLP:
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, kernels: Kernels) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self._gate_up = ColumnParallelLinear(hidden_size, parts)
        self._down = RowParallelLinear(intermediate_size, hidden_size)
        self._kernels = kernels

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._gate_up.weights(prefix)
        yield from self._down.weights(f"{prefix}.down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden_size] -> the same."""
        return self._down(self._kernels.silu_mul(self._gate_up(x)))
