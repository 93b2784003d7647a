"""One step's flat batch as the attention kernels see it, built once a step and shared by all layers.

It is a few columns by row, which is all that the native kernels want. What plain torch wants (indices,
buckets, masks) is made of them when first asked for.

For plain torch, rows that compute one token are decodes: they are gathered into a few buckets of similar
length, each one batched product. Rows that compute more are prefill chunks, each a product of its own. A
step may hold both; the split is by row, so a row's result does not depend on its neighbours.

In a group with a window of W tokens, position p sees p - W + 1 to p, and only blocks that hold a visible
position are gathered: those before may belong to others by now, and hold anything.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# A bucket of decodes is cut where that spares at least this many padded positions: below it, a
# further call costs more than the padding it removes.
_WORTH_A_BUCKET = 1024


@dataclass(frozen=True)
class DecodeBucket:
    """Decode rows, padded to the one with the most visible blocks."""

    tokens: Tensor | None  # int64 [n]: where in the flat batch; None: all of the step, in order
    blocks: Tensor  # int64 [n * max_blocks]: each row's visible blocks, the last repeated as padding
    mask: Tensor  # float32 [n, 1, 1, max_blocks * block_size]: 0 or -inf


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive tokens of one row."""

    start: int  # of its tokens in the flat batch
    stop: int
    context: int  # positions in `blocks`, up to the chunk's last
    blocks: Tensor  # int64 [ceil(context / block_size)], from the first that the chunk can see
    mask: Tensor | None  # float32 [stop - start, context]; None: plain causal


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """What attention needs of a step for one KV group.

    It covers the step's own tokens, the first of the flat batch; what follows them there is padding.
    """

    starts: npt.NDArray[np.int64]  # [rows + 1]: where each row's tokens begin in the flat batch
    computed: npt.NDArray[np.int64]  # [rows]: how many of each row's tokens were in the cache before
    tables: npt.NDArray[np.int32]  # [rows, >= blocks of the longest row], block IDs, dense
    block_size: int  # tokens
    window: int  # tokens that a token can see, itself included; 0: all before it

    @property
    def tokens(self) -> int:
        """The step's own."""
        return int(self.starts[-1])

    @cached_property
    def write_to(self) -> tuple[Tensor, Tensor]:
        """Where each token's key and value go: blocks and offsets in them, both int64 [tokens]."""
        counts = np.diff(self.starts)
        row_of_token = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(self.tokens) - np.repeat(self.starts[:-1] - self.computed, counts)
        blocks = self.tables[row_of_token, positions // self.block_size].astype(np.int64)
        return torch.from_numpy(blocks), torch.from_numpy(positions % self.block_size)

    @cached_property
    def decodes(self) -> tuple[DecodeBucket, ...]:
        """The rows that compute one token."""
        return _decode_buckets(np.flatnonzero(np.diff(self.starts) == 1), self.starts, self._visible)

    @cached_property
    def prefills(self) -> tuple[PrefillChunk, ...]:
        """The rows that compute more."""
        visible = self._visible
        return tuple(
            _prefill_chunk(int(self.starts[i]), int(self.starts[i + 1]), int(i), visible)
            for i in np.flatnonzero(np.diff(self.starts) != 1)
        )

    @cached_property
    def _visible(self) -> _Visible:
        hidden = np.maximum(0, self.computed - self.window + 1) if self.window else self.computed * 0
        context = self.computed + np.diff(self.starts)
        return _Visible(self.tables, hidden // self.block_size, context, self.block_size, self.window)


def build_attention_batch(
    starts: npt.NDArray[np.int64],
    computed: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int32],
    block_size: int,
    window: int = 0,
) -> AttentionBatch:
    """The columns of `AttentionBatch`, which keeps them: they must not change while it is used."""
    return AttentionBatch(
        starts=np.ascontiguousarray(starts, np.int64),
        computed=np.ascontiguousarray(computed, np.int64),
        tables=np.ascontiguousarray(tables, np.int32),
        block_size=block_size,
        window=window,
    )


@dataclass(frozen=True)
class _Visible:
    """What each row can see, columns by row."""

    tables: npt.NDArray[np.int32]  # [rows, blocks]
    first: npt.NDArray[np.int64]  # index of the first visible block
    context: npt.NDArray[np.int64]  # positions up to the row's last token
    block_size: int
    window: int

    @property
    def blocks(self) -> npt.NDArray[np.int64]:
        """Visible blocks of each row."""
        return -(-self.context // self.block_size) - self.first


def _decode_buckets(
    rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], visible: _Visible
) -> tuple[DecodeBucket, ...]:
    if not len(rows):
        return ()
    blocks = visible.blocks
    order = rows[np.argsort(-blocks[rows], kind="stable")]
    cuts = [0, *_cuts(blocks[order], visible.block_size), len(order)]
    if len(cuts) == 2 and len(rows) == starts[-1]:
        return (_decode_bucket(rows, None, visible),)
    return tuple(
        _decode_bucket(part, torch.from_numpy(starts[part]), visible)
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


def _decode_bucket(rows: npt.NDArray[np.int64], tokens: Tensor | None, visible: _Visible) -> DecodeBucket:
    size, blocks, first = visible.block_size, visible.blocks[rows, None], visible.first[rows, None]
    context = visible.context[rows, None]
    longest = int(blocks.max())
    columns = first + np.minimum(np.arange(longest), blocks - 1)
    positions = first * size + np.arange(longest * size)
    hidden = positions >= context
    if visible.window:
        hidden |= positions < context - visible.window
    mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
    return DecodeBucket(
        tokens=tokens,
        blocks=torch.from_numpy(visible.tables[rows[:, None], columns].astype(np.int64).reshape(-1)),
        mask=torch.from_numpy(mask).view(len(rows), 1, 1, -1),
    )


def _prefill_chunk(start: int, stop: int, row: int, visible: _Visible) -> PrefillChunk:
    first, context, window = int(visible.first[row]), int(visible.context[row]), visible.window
    length, seen = stop - start, context - first * visible.block_size
    mask = None
    if seen > length or 0 < window < length:
        mask = torch.full((length, seen), -torch.inf).triu_(seen - length + 1)
        if window:
            # A query's own position is on diagonal seen - length; W further back is out of the window.
            outside = torch.ones((length, seen), dtype=torch.bool).tril_(seen - length - window)
            mask.masked_fill_(outside, -torch.inf)
    blocks = visible.tables[row, first : -(-context // visible.block_size)].astype(np.int64)
    return PrefillChunk(start, stop, seen, torch.from_numpy(blocks), mask)
