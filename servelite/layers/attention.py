"""Causal self-attention over the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from servelite.layers.build import Build
from servelite.layers.linear import ColumnParallelLinear, RowParallelLinear
from servelite.layers.norm import RMSNorm
from servelite.layers.partition import equal_share, kv_head_share
from servelite.layers.rotary import Rotation
from servelite.layers.step_context import StepContext
from servelite.layers.weights import WeightSlot


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one layer's attention, before it is divided over ranks."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    scale: float  # of a query's product with a key, before the softmax


class QueryKeyNorm:
    """A norm over each head of the queries and of the keys, one weight for all of either."""

    def __init__(self, head_dim: int, eps: float, build: Build, *, offset: float = 0.0) -> None:
        self._query = RMSNorm(head_dim, eps, build, offset=offset)
        self._key = RMSNorm(head_dim, eps, build, offset=offset)

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._query.weights(f"{prefix}.q_norm")
        yield from self._key.weights(f"{prefix}.k_norm")

    def __call__(self, query_key: Tensor, num_heads: int) -> Tensor:
        """[tokens, heads, head_dim], the first `num_heads` queries -> the same."""
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        return torch.cat((self._query(query), self._key(key)), dim=1)


class SelfAttention:
    """Grouped-query attention (arXiv 2305.13245): o_proj(attend(rope(norm(q)), rope(norm(k)), v)).

    q, k, v = qkv_proj(x); the norms are Qwen3's and Gemma 3's, others have none. A tensor-parallel rank has
    consecutive query heads, and the KV heads that these read.
    """

    def __init__(
        self,
        shape: AttentionShape,
        layer: int,
        group: int,
        build: Build,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        norm: QueryKeyNorm | None = None,
    ) -> None:
        """`group`: which of the model's KV groups `layer` belongs to."""
        heads = equal_share(shape.num_heads, build.group.rank, build.group.size)
        kv_heads = kv_head_share(shape.num_kv_heads, build.group.rank, build.group.size)
        self._heads, self._kv_heads, self._head_dim = heads.size, kv_heads.size, shape.head_dim
        self._layer, self._group, self._scale = layer, group, shape.scale
        self._kernels, self._norm = build.kernels, norm
        query, key = heads.times(shape.head_dim), kv_heads.times(shape.head_dim)
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self._qkv = ColumnParallelLinear(shape.hidden_size, parts, build, bias=qkv_bias)
        self._out = RowParallelLinear(query, shape.hidden_size, build, bias=out_bias)

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        prefix = f"{prefix}.self_attn"
        yield from self._qkv.weights(prefix)
        if self._norm is not None:
            yield from self._norm.weights(prefix)
        yield from self._out.weights(f"{prefix}.o_proj")

    def __call__(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """[tokens, hidden_size] -> the same."""
        heads, kv_heads = self._heads, self._kv_heads
        states = self._qkv(x).view(len(x), heads + 2 * kv_heads, self._head_dim)
        query_key, value = states[:, : heads + kv_heads], states[:, heads + kv_heads :]
        if self._norm is not None:
            query_key = self._norm(query_key, heads)
        query_key = self._kernels.rope(query_key, rotation.cos, rotation.sin)
        query, key = query_key[:, :heads], query_key[:, heads:]
        cache, batch = ctx.caches[self._layer], ctx.batches[self._group]
        self._kernels.write_kv(key, value, cache, batch)
        attended = self._kernels.paged_attention(query, cache, batch, self._scale)
        return self._out(attended.reshape(len(x), -1))
