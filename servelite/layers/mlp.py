"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from torch import Tensor

from servelite.kernels.dispatch import Kernels
from servelite.layers.build import Build
from servelite.layers.linear import ColumnParallelLinear, RowParallelLinear
from servelite.layers.partition import equal_share
from servelite.layers.weights import WeightSlot

Activation = Callable[[Tensor], Tensor]
"""From gate and up side by side, [tokens, 2n], to act(gate) * up, [tokens, n]."""

ACTIVATIONS: Final[dict[str, Callable[[Kernels], Activation]]] = {
    "silu": lambda kernels: kernels.silu_mul,
    "gelu_pytorch_tanh": lambda kernels: kernels.gelu_tanh_mul,
}
"""By the name that config.json has for it."""


class GatedMLP:
    """down(act(gate(x)) * up(x)): SwiGLU with silu, GeGLU with gelu (arXiv 2002.05202).

    A tensor-parallel rank has a part of the intermediate features, the same of all three.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        build: Build,
        *,
        activation: str = "silu",
        bias: bool = False,
    ) -> None:
        """`activation`: one of ACTIVATIONS."""
        inner = equal_share(intermediate_size, build.group.rank, build.group.size)
        self._gate_up = ColumnParallelLinear(
            hidden_size, {"gate_proj": inner, "up_proj": inner}, build, bias=bias
        )
        self._activate = ACTIVATIONS[activation](build.kernels)
        self._down = RowParallelLinear(inner, hidden_size, build, bias=bias)

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._gate_up.weights(f"{prefix}.mlp")
        yield from self._down.weights(f"{prefix}.mlp.down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden_size] -> the same."""
        return self._down(self._activate(self._gate_up(x)))
