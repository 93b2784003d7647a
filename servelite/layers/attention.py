"""Causal self-attention over the paged cache."""

from __future__ import annotations

from torch import Tensor

from servelite.kernels.dispatch import Kernels
from servelite.layers.rotary import Rotation
from servelite.layers.step_context import StepContext


class PagedAttention:
    """Rotates queries and keys, puts keys and values into the cache, attends. Has no weights."""

    def __init__(
        self, layer: int, group: int, num_heads: int, num_kv_heads: int, head_dim: int, kernels: Kernels
    ) -> None:
        """`group`: which of the model's KV groups `layer` belongs to."""
        self._layer, self._group = layer, group
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._kernels = kernels

    def __call__(self, qkv: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """[tokens, (heads + 2 kv_heads) * head_dim], queries first -> [tokens, heads * head_dim]."""
        rotated = self._heads + self._kv_heads
        states = qkv.view(len(qkv), rotated + self._kv_heads, self._head_dim)
        query_key = self._kernels.rope(states[:, :rotated], rotation.cos, rotation.sin)
        query, key = query_key[:, : self._heads], query_key[:, self._heads :]
        cache, batch = ctx.caches[self._layer], ctx.batches[self._group]
        self._kernels.write_kv(key, states[:, rotated:], cache, batch)
        out = self._kernels.paged_attention(query, cache, batch, self._head_dim**-0.5)
        return out.reshape(len(qkv), -1)
