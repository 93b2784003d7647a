"""Mixture of experts: a feed-forward layer in which each token goes through a few of many small ones.

(arXiv 1701.06538, 2401.04088.) No expert has a capacity, so no token is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from servelite.layers.build import Build
from servelite.layers.partition import equal_share
from servelite.layers.weights import WeightSlot


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls the parts, below "model.layers.N."."""

    block: str  # "mlp", "block_sparse_moe"
    gate: str  # of each expert, below "<block>.experts.E."
    up: str
    down: str


class SparseMoE:
    """Router and experts: sum over a token's k likeliest experts of p_e * down_e(silu(gate_e(x)) * up_e(x)).

    A token's result does not depend on the batch: its experts are chosen from its own row alone, and
    their k terms are added in the order of their probability.

    A tensor-parallel rank has the whole router, and of every expert the same part of the intermediate
    features: it routes as the others do, and the ranks' sums are added once.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        names: ExpertNames,
        build: Build,
        *,
        renormalise: bool,
    ) -> None:
        """`renormalise`: a token's k probabilities are scaled to add up to 1."""
        self._top_k, self._renormalise, self._names = top_k, renormalise, names
        self._kernels, self._group = build.kernels, build.group
        self._inner = equal_share(intermediate_size, build.group.rank, build.group.size)
        inner = self._inner.size
        self._router = torch.empty((num_experts, hidden_size), dtype=build.dtype)
        self._gate_up = torch.empty((num_experts, 2 * inner, hidden_size), dtype=build.dtype)
        self._down = torch.empty((num_experts, hidden_size, inner), dtype=build.dtype)

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        names, block = self._names, f"{prefix}.{self._names.block}"
        yield WeightSlot(f"{block}.gate.weight", self._router)
        for expert, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            gate, up = gate_up.chunk(2)
            yield WeightSlot(f"{block}.experts.{expert}.{names.gate}.weight", gate, share=self._inner)
            yield WeightSlot(f"{block}.experts.{expert}.{names.up}.weight", up, share=self._inner)
            yield WeightSlot(f"{block}.experts.{expert}.{names.down}.weight", down, share=self._inner, dim=1)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden_size] -> the same."""
        shares, experts = self._route(x)
        out = self._run_experts(x, experts.view(-1)).view(len(x), self._top_k, -1)
        return self._group.all_reduce((out * shares.unsqueeze(-1)).sum(dim=1))

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's k likeliest experts, int64 [tokens, k], likeliest first, and their shares."""
        probabilities = F.linear(x, self._router).float().softmax(dim=-1)
        shares, experts = probabilities.topk(self._top_k, dim=-1)
        if self._renormalise:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares.to(x.dtype), experts

    def _run_experts(self, x: Tensor, experts: Tensor) -> Tensor:
        """The output of each of `experts`, [tokens * k], k for each token: [tokens * k, hidden_size].

        Tokens are sorted by expert, so that each one that has tokens is one product.
        """
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=len(self._router)).tolist()
        sorted_x = x[order // self._top_k]
        sorted_out = torch.empty_like(sorted_x)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                hidden = self._kernels.silu_mul(F.linear(sorted_x[part], self._gate_up[expert]))
                sorted_out[part] = F.linear(hidden, self._down[expert])
                start += count
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        return out
