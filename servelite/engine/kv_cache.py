"""The KV cache manager: one pool of blocks, reference counts, and block tables by group and row.

Blocks of all groups hold equal bytes, so one pool serves them; a table is [group, row, block]. Every
operation is O(1) a block. Invariant (`check`): each block is in exactly one state, free or in use,
and its reference count equals the number of table entries that hold it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from servelite.ipc.messages import KVGroup

_NIL: Final = -1


class InvariantError(AssertionError):
    """The engine's own books do not add up: a bug, never a client's doing."""


class BlockPool:
    """Reference-counted blocks; the free ones form an intrusive doubly linked list, oldest first.

    Doubly linked, so that a block can also leave from the middle in O(1), as a prefix hit on a free
    block does. The last index is the list's sentinel.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.refs = [0] * num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def take(self) -> int:
        """The block that has been free longest, now with one reference.

        Raises:
            InvariantError: none is free; the caller asks `num_free` first.
        """
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            raise InvariantError("a block was taken from an empty pool")
        self._unlink(block)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block, in use or free."""
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """One reference less; at none the block becomes the youngest free one."""
        if self.refs[block] <= 0:
            raise InvariantError(f"block {block} was released without a reference")
        self.refs[block] -= 1
        if self.refs[block] == 0:
            last = self._prev[self.num_blocks]
            self._next[last], self._prev[block] = block, last
            self._next[block], self._prev[self.num_blocks] = self.num_blocks, block
            self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self._next[block] = self._prev[block] = _NIL
        self.num_free -= 1

    def free_blocks(self) -> list[int]:
        """The free list, oldest first (for checks)."""
        blocks: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks and len(blocks) <= self.num_blocks:
            blocks.append(block)
            block = self._next[block]
        return blocks


class KVCacheManager:
    """Gives rows the blocks their tokens need, in every group or in none."""

    def __init__(
        self, groups: tuple[KVGroup, ...], num_blocks: int, block_size: int, max_rows: int, max_model_len: int
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.max_blocks = -(-max_model_len // block_size)
        shape = (len(groups), max_rows)
        self.tables: npt.NDArray[np.int32] = np.full((*shape, self.max_blocks), _NIL, dtype=np.int32)
        self.counts: npt.NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        self.told: npt.NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        """How many of a row's blocks the workers know."""

    @property
    def num_free(self) -> int:
        """Free blocks in the pool."""
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request hold, over all groups."""
        return len(self.groups) * -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of that length could ever run alone."""
        return self.blocks_for(num_tokens) <= self.pool.num_blocks

    def missing(self, row: int, num_tokens: int) -> int:
        """Blocks to allocate before the row can hold `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - int(self.counts[:, row].sum()))

    def grow(self, row: int, num_tokens: int) -> bool:
        """Give the row blocks for `num_tokens` tokens in every group.

        False, and nothing is done, where too few are free.
        """
        if self.missing(row, num_tokens) > self.pool.num_free:
            return False
        want = -(-num_tokens // self.block_size)
        for group in range(len(self.groups)):
            table = self.tables[group, row]
            for position in range(int(self.counts[group, row]), want):
                table[position] = self.pool.take()
            self.counts[group, row] = max(want, int(self.counts[group, row]))
        return True

    def held(self, row: int) -> int:
        """Blocks in the row's tables."""
        return int(self.counts[:, row].sum())

    def untold(self, rows: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """New blocks of `rows` since the last call, for the plan, and mark them told.

        Returns:
            counts [groups, len(rows)] and the flat block IDs in that order.
        """
        counts = self.counts[:, rows] - self.told[:, rows]
        pieces = [
            self.tables[group, row, self.told[group, row] : self.counts[group, row]]
            for group, at in np.argwhere(counts)
            for row in (rows[at],)
        ]
        flat = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
        self.told[:, rows] = self.counts[:, rows]
        return counts, flat

    def free(self, row: int) -> None:
        """Drop the row's references, tail first, so that a prefix outlives what follows it."""
        for group in range(len(self.groups)):
            count = int(self.counts[group, row])
            for block in self.tables[group, row, :count][::-1].tolist():
                self.pool.release(block)
            self.tables[group, row, :count] = _NIL
        self.counts[:, row] = self.told[:, row] = 0

    def check(self) -> None:
        """Raise InvariantError unless the books add up. O(blocks): tests and --debug only."""
        references = np.zeros(self.pool.num_blocks, dtype=np.int64)
        for group in range(len(self.groups)):
            for row in np.flatnonzero(self.counts[group]):
                held = self.tables[group, row, : self.counts[group, row]]
                if (held < 0).any():
                    raise InvariantError(f"row {row} holds a block that is none: {held}")
                np.add.at(references, held, 1)
        if not np.array_equal(references, self.pool.refs):
            wrong = np.flatnonzero(references != np.asarray(self.pool.refs))
            raise InvariantError(f"reference counts of blocks {wrong[:10]} are not what the tables hold")
        free = self.pool.free_blocks()
        if len(free) != self.pool.num_free or set(free) != set(np.flatnonzero(references == 0).tolist()):
            raise InvariantError(f"{len(free)} blocks in the free list, {self.pool.num_free} counted free")
        if (self.told > self.counts).any():
            raise InvariantError("the workers were told of more blocks than a row has")
