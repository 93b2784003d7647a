"""The pool of KV blocks: references, the free list, and which content a block is known to hold.

A block is in use (it has references) or free; apart from that it may be *published*: full, its
tokens known, the step that fills it submitted, and findable by the hash of its content. A published
block is never written. It is *pending* until that step's result is in, *committed* after; only a
later step may use a pending block. A free block keeps its content and its name until it is taken,
oldest first, so the free list is the cache's LRU order.
"""

from __future__ import annotations

from typing import Final

from servelite.engine.invariants import InvariantError

_NIL: Final = -1


class BlockPool:
    """Reference-counted blocks; the free ones form an intrusive doubly linked list, oldest first.

    Doubly linked, so that a block can also leave from the middle in O(1), as a prefix hit on a free
    block does. The last index is the list's sentinel.
    """

    def __init__(self, num_blocks: int, groups: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.refs = [0] * num_blocks
        self.published_in = [0] * num_blocks  # the step that fills a published block
        self._name: list[tuple[int, bytes] | None] = [None] * num_blocks  # (group, hash)
        self._by_hash: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def take(self) -> int:
        """The block that has been free longest, now with one reference and no content.

        Raises:
            InvariantError: none is free; the caller asks `num_free` first.
        """
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            raise InvariantError("a block was taken from an empty pool")
        self._unlink(block)
        self.unpublish(block)
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

    def publish(self, block: int, group: int, name: bytes, step: int) -> None:
        """Make a full block findable. Where the content is known already, the older block keeps the name."""
        if name not in self._by_hash[group]:
            self._by_hash[group][name] = block
            self._name[block] = (group, name)
            self.published_in[block] = step

    def unpublish(self, block: int) -> None:
        """Forget what a block holds."""
        name = self._name[block]
        if name is not None:
            del self._by_hash[name[0]][name[1]]
            self._name[block] = None

    def unpublish_from(self, step: int) -> None:
        """Forget all that `step` or a later one was to fill. O(published blocks)."""
        for names in self._by_hash:
            for block in [block for block in names.values() if self.published_in[block] >= step]:
                self.unpublish(block)

    def find(self, group: int, name: bytes, step: int) -> int | None:
        """The block with this content that a step may read, or None."""
        block = self._by_hash[group].get(name)
        return block if block is not None and self.published_in[block] < step else None

    def is_published(self, block: int) -> bool:
        """Whether a block can be found by its content."""
        return self._name[block] is not None

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

    def check(self) -> None:
        """Raise InvariantError unless free list, counts and names agree. O(blocks)."""
        free = self.free_blocks()
        unreferenced = {block for block, refs in enumerate(self.refs) if refs == 0}
        if len(free) != self.num_free or set(free) != unreferenced:
            raise InvariantError(f"{len(free)} blocks in the free list, {self.num_free} counted free")
        named = {name: block for block, name in enumerate(self._name) if name is not None}
        found = {(g, name): block for g, names in enumerate(self._by_hash) for name, block in names.items()}
        if named != found:
            raise InvariantError("the blocks' names and the table of names differ")
