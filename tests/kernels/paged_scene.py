"""A cache and a flat batch over it, for tests of attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from servelite.kernels.attention_batch import AttentionBatch, build_attention_batch
from servelite.kernels.kv_layout import KVGroupSpec, KVPool, LayerCache


@dataclass(frozen=True)
class Shape:
    """Of one layer's attention."""

    heads: int
    kv_heads: int
    dim: int
    block: int = 16
    window: int = 0
    cache: torch.dtype = torch.float32
    query: torch.dtype = torch.float32


@dataclass(frozen=True)
class Row:
    """A sequence whose last `count` positions are computed."""

    query: Tensor  # [positions, heads, dim]
    keys: Tensor  # [positions, kv_heads, dim]
    values: Tensor
    count: int

    @property
    def computed(self) -> int:
        return len(self.keys) - self.count


def make_rows(shape: Shape, sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Row]:
    """Noise; `sizes` are (positions in the cache, positions computed)."""
    random = torch.Generator().manual_seed(seed)

    def noise(positions: int, heads: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(positions, heads, shape.dim, generator=random).to(dtype)

    return [
        Row(
            query=noise(done + count, shape.heads, shape.query),
            keys=noise(done + count, shape.kv_heads, shape.cache),
            values=noise(done + count, shape.kv_heads, shape.cache),
            count=count,
        )
        for done, count in sizes
    ]


def part(row: Row, done: int, count: int) -> Row:
    """The step that computes positions `done` to `done + count` of `row`."""
    end = done + count
    return Row(row.query[:end], row.keys[:end], row.values[:end], count)


def lay_out(
    shape: Shape, rows: Sequence[Row], stale: float = 0.0, seed: int = 0
) -> tuple[Tensor, LayerCache, AttentionBatch, float]:
    """The arguments of `paged_attention`, the rows' keys and values in blocks of any order.

    All else holds `stale`: other layers, the rest of each last block, positions that the window has left
    behind, whose table entries name another's block.
    """
    needed = [-(-len(row.keys) // shape.block) for row in rows]
    spec = KVGroupSpec("full", (0, 1, 2), shape.kv_heads, shape.dim)
    pool = KVPool((spec,), 1 + sum(needed), shape.block, shape.cache)
    for layer in pool.layers:
        layer.keys.fill_(stale)
        layer.values.fill_(stale)
    cache = pool.layers[1]
    order = 1 + np.random.default_rng(seed).permutation(sum(needed))
    tables = np.full((len(rows), max(needed)), 1 << 30, np.int32)  # what is past a row's end is never read
    taken = 0
    for i, (row, blocks) in enumerate(zip(rows, needed, strict=True)):
        tables[i, :blocks] = order[taken : taken + blocks]
        taken += blocks
        positions = np.arange(len(row.keys))
        where = torch.from_numpy(tables[i, positions // shape.block].astype(np.int64))
        offsets = torch.from_numpy(positions % shape.block)
        cache.keys[where, offsets] = row.keys
        cache.values[where, offsets] = row.values
        if shape.window:
            lost = max(0, row.computed - shape.window + 1)
            cache.keys[where[:lost], offsets[:lost]] = stale
            cache.values[where[:lost], offsets[:lost]] = stale
            tables[i, : lost // shape.block] = 0
    starts = np.concatenate(([0], np.cumsum([row.count for row in rows])))
    computed = np.array([row.computed for row in rows])
    batch = build_attention_batch(starts, computed, tables, shape.block, shape.window)
    query = torch.cat([row.query[row.computed :] for row in rows])
    return query, cache, batch, shape.dim**-0.5
