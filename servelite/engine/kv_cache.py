"""The KV cache manager: block tables by group and row over one pool, and prefix hits.

Blocks of all groups hold equal bytes, so one pool serves them; a table is [group, row, block]. A
*full* group keeps all blocks of a request. A *window* group keeps only those that its next token can
still see: the others go back as soon as no step in flight reads them. Every operation is O(1) a
block. Invariant (`check`): each block is in exactly one state, free or in use, and its reference
count equals the number of table entries that hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from servelite.engine.block_pool import BlockPool
from servelite.engine.invariants import InvariantError
from servelite.ipc.messages import KVGroup
from servelite.worker.kv_pool_size import most_blocks

_NIL: Final = -1
HOLE: Final = 0
"""What a worker is told for a table entry that no token of the row can see any more."""


@dataclass(frozen=True)
class PrefixHit:
    """The longest cached prefix of a request: blocks by group, from the first one still needed."""

    num_blocks: int = 0
    first: tuple[int, ...] = ()  # by group: index of the first block taken
    blocks: tuple[tuple[int, ...], ...] = ()  # by group

    def num_free(self, pool: BlockPool) -> int:
        """How many of the blocks are free now, and would not be any more."""
        return sum(pool.refs[block] == 0 for blocks in self.blocks for block in blocks)


class KVCacheManager:
    """Gives rows the blocks their tokens need, in every group or in none."""

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_model_len: int,
        *,
        prefix_caching: bool = True,
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, len(groups))
        self.max_blocks = -(-max_model_len // block_size)
        self._caching = prefix_caching
        shape = (len(groups), max_rows)
        self.tables = np.full((*shape, self.max_blocks), _NIL, np.int32)
        self.counts = np.zeros(shape, np.int32)  # length of each table, holes included
        self.first = np.zeros(shape, np.int32)  # index of the first entry that is not a hole
        self.told = np.zeros(shape, np.int32)  # how many of a row's entries the workers know
        self.published = np.zeros(max_rows, np.int32)  # how many of a row's first blocks are published

    @property
    def num_free(self) -> int:
        """Free blocks in the pool."""
        return self.pool.num_free

    def blocks_for(self, num_tokens: int, in_flight: int = 0) -> int:
        """`most_blocks` over all groups."""
        return sum(most_blocks(num_tokens, self.block_size, group.window, in_flight) for group in self.groups)

    def fits(self, num_tokens: int, in_flight: int) -> bool:
        """Whether a request of that length could ever run alone."""
        return self.blocks_for(num_tokens, in_flight) <= self.pool.num_blocks

    def missing(self, row: int, num_tokens: int) -> int:
        """Blocks to allocate before the row can hold `num_tokens` tokens."""
        want = -(-num_tokens // self.block_size)
        return int(np.maximum(0, want - self.counts[:, row]).sum())

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
        return int((self.counts[:, row] - self.first[:, row]).sum())

    def shared_tokens(self, row: int) -> int:
        """Tokens at the row's start whose blocks other rows hold too: what the cache surely keeps."""
        shared = self.max_blocks
        for group in range(len(self.groups)):
            first = int(self.first[group, row])
            blocks = self.tables[group, row, first : self.counts[group, row]].tolist()
            run = next((i for i, block in enumerate(blocks) if self.pool.refs[block] == 1), len(blocks))
            shared = min(shared, first + run if run else 0)
        return shared * self.block_size

    # ------------------------------------------------------------ prefix hits

    def find_hit(self, names: list[bytes], limit: int, step: int) -> PrefixHit:
        """The longest cached prefix that step `step` may read.

        Args:
            names: of the request's full blocks.
            limit: blocks at the most; less than the whole prompt, whose last token must be computed.
        """
        if not self._caching:
            return PrefixHit()
        length = min(limit, len(names))
        for group, spec in enumerate(self.groups):
            if not spec.window:
                length = self._full_run(group, names[:length], step)
        settled = False
        while length and not settled:  # each window group may lower it; until none does
            settled = True
            for group, spec in enumerate(self.groups):
                if spec.window and (possible := self._window_run(group, spec, names[:length], step)) < length:
                    length, settled = possible, False
        if not length:
            return PrefixHit()
        first = tuple(max(0, length - self._needed(spec)) if spec.window else 0 for spec in self.groups)
        blocks = tuple(
            tuple(self._block(group, name, step) for name in names[first[group] : length])
            for group in range(len(self.groups))
        )
        return PrefixHit(length, first, blocks)

    def _needed(self, spec: KVGroup) -> int:
        """Blocks before a border that a window group's next token can see."""
        return -(-(spec.window - 1) // self.block_size)

    def _full_run(self, group: int, names: list[bytes], step: int) -> int:
        for count, name in enumerate(names):
            if self.pool.find(group, name, step) is None:
                return count
        return len(names)

    def _window_run(self, group: int, spec: KVGroup, names: list[bytes], step: int) -> int:
        """The largest length whose last blocks, as many as the window needs, are cached."""
        needed, run, length = self._needed(spec), 0, len(names)
        for at in range(len(names) - 1, -1, -1):
            if run == needed:
                return length
            if self.pool.find(group, names[at], step) is None:
                run, length = 0, at
            else:
                run += 1
        return length  # a whole prefix shorter than the window, or nothing

    def _block(self, group: int, name: bytes, step: int) -> int:
        block = self.pool.find(group, name, step)
        if block is None:
            raise InvariantError("a block of a hit is gone")
        return block

    def adopt(self, row: int, hit: PrefixHit) -> None:
        """Put a hit's blocks at the start of the row's empty tables."""
        for group, blocks in enumerate(hit.blocks):
            for block in blocks:
                self.pool.share(block)
            first = hit.first[group]
            self.tables[group, row, first : first + len(blocks)] = blocks
            self.first[group, row] = first
            self.counts[group, row] = hit.num_blocks
        self.published[row] = hit.num_blocks

    def publish(self, row: int, names: list[bytes], step: int) -> None:
        """Offer the row's full blocks to the cache; `step` is the last one that writes into them.

        Args:
            names: of all the row's full blocks; those offered before are skipped.
        """
        if self._caching:
            for group in range(len(self.groups)):
                begin = max(int(self.published[row]), int(self.first[group, row]))
                for position in range(begin, len(names)):
                    block = int(self.tables[group, row, position])
                    self.pool.publish(block, group, names[position], step)
        self.published[row] = len(names)

    def retract(self, row: int, hit_blocks: int) -> set[int]:
        """Unpublish what the row computed, its hit of `hit_blocks` aside; returns the rows that share it."""
        tainted: set[int] = set()
        for group in range(len(self.groups)):
            begin = max(hit_blocks, int(self.first[group, row]))
            blocks = self.tables[group, row, begin : self.counts[group, row]]
            for block in blocks.tolist():
                self.pool.unpublish(block)
            holders = np.flatnonzero(np.isin(self.tables[group], blocks).any(axis=1))
            tainted.update(holders.tolist())
        return tainted - {row}

    # ------------------------------------------------------------ tables

    def untold(self, rows: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """New table entries of `rows` since the last call, for the plan, and mark them told.

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
        return counts, np.where(flat == _NIL, HOLE, flat)

    def drop_out_of_window(self, rows: npt.NDArray[np.int32], num_done: npt.NDArray[np.int32]) -> None:
        """Give back what no later token of the rows sees; `num_done` tokens' steps have completed."""
        for group, spec in enumerate(self.groups):
            if not spec.window:
                continue
            end = np.minimum((num_done - spec.window + 1) // self.block_size, self.counts[group, rows])
            for at in np.flatnonzero(end > self.first[group, rows]):
                row = int(rows[at])
                self._release(group, row, int(self.first[group, row]), int(end[at]))
                self.first[group, row] = end[at]

    def free(self, row: int) -> None:
        """Drop the row's references, tail first, so that a prefix outlives what follows it."""
        for group in range(len(self.groups)):
            self._release(group, row, int(self.first[group, row]), int(self.counts[group, row]))
        self.counts[:, row] = self.told[:, row] = self.first[:, row] = self.published[row] = 0

    def _release(self, group: int, row: int, begin: int, end: int) -> None:
        for block in self.tables[group, row, begin:end][::-1].tolist():
            self.pool.release(block)
        self.tables[group, row, begin:end] = _NIL

    def check(self) -> None:
        """Raise InvariantError unless the books add up. O(blocks): tests and --debug only."""
        references = np.zeros(self.pool.num_blocks, dtype=np.int64)
        for group in range(len(self.groups)):
            for row in np.flatnonzero(self.counts[group]):
                held = self.tables[group, row, self.first[group, row] : self.counts[group, row]]
                if (held < 0).any():
                    raise InvariantError(f"row {row} holds a block that is none: {held}")
                np.add.at(references, held, 1)
        if not np.array_equal(references, self.pool.refs):
            wrong = np.flatnonzero(references != np.asarray(self.pool.refs))
            raise InvariantError(f"reference counts of blocks {wrong[:10]} are not what the tables hold")
        self.pool.check()
        if (self.told > self.counts).any() or (self.first > self.counts).any():
            raise InvariantError("a table is shorter than what was told of it or dropped from it")
