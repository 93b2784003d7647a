"""The KV cache's layout, decided here and nowhere else.

One pool serves all layers of all KV groups: a block belongs to one group at a time, and is then
[layer of the group, key or value, position in block, KV head, head dimension]. Blocks of all groups have
equal bytes, so any block ID can serve any group; a group with fewer layers than the others leaves the rest
of its blocks unused. A block's bytes are contiguous, so zeroing, copying or shipping one is a single
range; one layer's keys are a strided view of all blocks. Kernels take the views and never compute an
address.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVGroupSpec:
    """Layers of one model whose blocks live and die together."""

    kind: str  # as `ipc.messages.KVGroup.kind`
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int = 0  # tokens; 0 unless kind is "window"
    slots: int = 0  # layers that a block has room for; 0: as many as there are

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block of `block_size` tokens, room for all the group's slots."""
        values = self.num_slots * 2 * block_size * self.num_kv_heads * self.head_dim
        return values * dtype.itemsize

    @property
    def num_slots(self) -> int:
        """Layers that a block has room for."""
        return self.slots or len(self.layers)


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's part of the pool, both [num_blocks, block_size, num_kv_heads, head_dim], strided."""

    keys: Tensor
    values: Tensor


class KVPool:
    """The memory of all KV blocks. Its pages are touched when a block is first used."""

    def __init__(
        self,
        specs: tuple[KVGroupSpec, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Raises:
            ValueError: the groups' blocks differ in bytes, so one pool cannot serve them.
            RuntimeError: the memory is not there (torch's own text).
        """
        sizes = {spec.block_bytes(block_size, dtype) for spec in specs}
        if len(sizes) != 1:
            raise ValueError(f"the KV groups' blocks differ in size: {sorted(sizes)} bytes")
        self.specs = specs
        self._blocks = torch.empty((num_blocks, sizes.pop() // dtype.itemsize), dtype=dtype)
        by_layer: dict[int, LayerCache] = {}
        for spec in specs:
            shape = (num_blocks, spec.num_slots, 2, block_size, spec.num_kv_heads, spec.head_dim)
            view = self._blocks.view(shape)
            for place, layer in enumerate(spec.layers):
                by_layer[layer] = LayerCache(keys=view[:, place, 0], values=view[:, place, 1])
        self.layers = tuple(by_layer[layer] for layer in sorted(by_layer))

    def zero(self, blocks: Tensor) -> None:
        """Clear `blocks` (int64 [n]).

        Attention multiplies what lies past a row's end by a weight of 0, and 0 x NaN is NaN: a block
        must not carry its former owner's non-finite values to the next one.
        """
        self._blocks.index_fill_(0, blocks, 0.0)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy blocks (both int64 [n])."""
        self._blocks.index_copy_(0, destinations, self._blocks.index_select(0, sources))
