"""One step's flat batch as the attention kernels see it, built once a step and shared by all layers.

Rows that compute one token are decodes: they are gathered into a few buckets of similar length, each
one batched product. Rows that compute more are prefill chunks, each a product of its own. A step may
hold both; the split is by row, so a row's result does not depend on its neighbours.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# A bucket of decodes is cut where that spares at least this many padded positions: below it, a
# further call costs more than the padding it removes.
_WORTH_A_BUCKET = 1024


@dataclass(frozen=True)
class DecodeBucket:
    """Decode rows, padded to the longest among them."""

    tokens: Tensor | None  # int64 [n]: where in the flat batch; None: the whole batch, in order
    blocks: Tensor  # int64 [n * max_blocks]: each row's table, its last block repeated as padding
    mask: Tensor  # float32 [n, 1, 1, max_blocks * block_size]: 0 or -inf


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive tokens of one row."""

    start: int  # of its tokens in the flat batch
    stop: int
    context: int  # positions attended to: those before the chunk, and the chunk's
    blocks: Tensor  # int64 [ceil(context / block_size)]
    mask: Tensor | None  # float32 [stop - start, context]; None: the chunk starts at 0, plain causal


@dataclass(frozen=True)
class AttentionBatch:
    """What attention needs of a step for one KV group."""

    write_blocks: Tensor  # int64 [tokens]: where each token's key and value go
    write_offsets: Tensor  # int64 [tokens]
    decodes: tuple[DecodeBucket, ...]
    prefills: tuple[PrefillChunk, ...]


def build_attention_batch(
    starts: npt.NDArray[np.int64],
    computed: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int32],
    block_size: int,
) -> AttentionBatch:
    """
    Args:
        starts: [rows + 1], where each row's tokens begin in the flat batch.
        computed: [rows], how many of each row's tokens are in the cache already.
        tables: [rows, >= blocks of the longest row], block IDs.
        block_size: tokens in a block.
    """
    counts = np.diff(starts)
    row_of_token = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - computed, counts)
    context = computed + counts
    single = counts == 1
    return AttentionBatch(
        write_blocks=torch.from_numpy(tables[row_of_token, positions // block_size].astype(np.int64)),
        write_offsets=torch.from_numpy(positions % block_size),
        decodes=_decode_buckets(np.flatnonzero(single), starts, context, tables, block_size),
        prefills=tuple(
            _prefill_chunk(int(starts[i]), int(starts[i + 1]), int(context[i]), tables[i], block_size)
            for i in np.flatnonzero(~single)
        ),
    )


def _decode_buckets(
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    context: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int32],
    block_size: int,
) -> tuple[DecodeBucket, ...]:
    if not len(rows):
        return ()
    blocks = -(-context // block_size)
    order = rows[np.argsort(-blocks[rows], kind="stable")]
    cuts = [0, *_cuts(blocks[order], block_size), len(order)]
    if len(cuts) == 2 and len(rows) == starts[-1]:
        return (_decode_bucket(rows, None, context, blocks, tables, block_size),)
    return tuple(
        _decode_bucket(part, torch.from_numpy(starts[part]), context, blocks, tables, block_size)
        for part in (order[a:b] for a, b in itertools.pairwise(cuts))
    )


def _cuts(blocks: npt.NDArray[np.int64], block_size: int) -> list[int]:
    """Where to cut `blocks` (descending): each bucket's rows have over half its longest row's blocks,
    unless the padding is small. At most log2 of the longest."""
    cuts: list[int] = []
    begin = 0
    while True:
        # The first row of at most half the bucket's longest; `blocks` descends, hence the minus.
        cut = begin + int(np.searchsorted(-blocks[begin:], -(blocks[begin] // 2)))
        if cut >= len(blocks):
            return cuts
        spared = int((len(blocks) - cut) * (blocks[begin] - blocks[cut])) * block_size
        if spared < _WORTH_A_BUCKET:
            return cuts
        cuts.append(cut)
        begin = cut


def _decode_bucket(
    rows: npt.NDArray[np.int64],
    tokens: Tensor | None,
    context: npt.NDArray[np.int64],
    blocks: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int32],
    block_size: int,
) -> DecodeBucket:
    longest = int(blocks[rows].max())
    columns = np.minimum(np.arange(longest), blocks[rows, None] - 1)
    past_end = np.arange(longest * block_size) >= context[rows, None]
    mask = np.where(past_end, np.float32(-np.inf), np.float32(0))
    return DecodeBucket(
        tokens=tokens,
        blocks=torch.from_numpy(tables[rows[:, None], columns].astype(np.int64).reshape(-1)),
        mask=torch.from_numpy(mask).view(len(rows), 1, 1, -1),
    )


def _prefill_chunk(
    start: int, stop: int, context: int, table: npt.NDArray[np.int32], block_size: int
) -> PrefillChunk:
    length = stop - start
    mask = None
    if context > length:
        mask = torch.full((length, context), -torch.inf).triu_(context - length + 1)
    blocks = table[: -(-context // block_size)].astype(np.int64)
    return PrefillChunk(start, stop, context, torch.from_numpy(blocks), mask)
