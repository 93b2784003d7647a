"""The block pool and the block tables: exact cases, and a random walk with every invariant checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelite.engine.block_pool import BlockPool
from servelite.engine.invariants import InvariantError
from servelite.engine.kv_cache import KVCacheManager
from servelite.ipc.messages import KVGroup

FULL = KVGroup("full", (0,), 64)


def manager(num_blocks: int = 10, groups: int = 1, rows: int = 4) -> KVCacheManager:
    return KVCacheManager((FULL,) * groups, num_blocks, block_size=4, max_rows=rows, max_model_len=64)


def test_blocks_come_back_oldest_first_and_the_tail_before_the_head() -> None:
    kv = manager()
    assert kv.grow(0, 12) and kv.tables[0, 0, :3].tolist() == [0, 1, 2]
    kv.free(0)
    assert kv.pool.free_blocks() == [3, 4, 5, 6, 7, 8, 9, 2, 1, 0]
    kv.check()


def test_growth_is_all_or_nothing_over_all_groups() -> None:
    kv = manager(num_blocks=5, groups=2)
    assert kv.grow(0, 8)
    assert not kv.grow(0, 9), "one block in each of two groups, and one is free"
    assert kv.num_free == 1 and kv.counts[:, 0].tolist() == [2, 2]
    assert kv.missing(0, 12) == 2
    kv.check()


def test_only_new_blocks_are_told() -> None:
    kv = manager()
    kv.grow(0, 8)
    kv.grow(2, 4)
    rows = np.array([2, 0], dtype=np.int32)
    counts, blocks = kv.untold(rows)
    assert counts.tolist() == [[1, 2]] and blocks.tolist() == [2, 0, 1]
    counts, blocks = kv.untold(rows)
    assert counts.tolist() == [[0, 0]] and blocks.tolist() == []
    kv.grow(0, 9)
    counts, blocks = kv.untold(rows)
    assert counts.tolist() == [[0, 1]] and blocks.tolist() == [3]


def test_a_free_block_can_be_taken_from_the_middle_of_the_list() -> None:
    pool = BlockPool(4, 1)
    pool.share(2)
    assert pool.free_blocks() == [0, 1, 3] and pool.num_free == 3
    pool.share(2)
    pool.release(2)
    assert pool.num_free == 3
    pool.release(2)
    assert pool.free_blocks() == [0, 1, 3, 2]


def test_misuse_is_an_error_and_check_finds_wrong_books() -> None:
    pool = BlockPool(1, 1)
    with pytest.raises(InvariantError):
        pool.release(0)
    pool.take()
    with pytest.raises(InvariantError):
        pool.take()
    for spoil in (
        lambda kv: kv.pool.refs.__setitem__(0, 2),
        lambda kv: kv.tables.__setitem__((0, 1, 0), kv.tables[0, 0, 0]) or kv.counts.__setitem__((0, 1), 1),
        lambda kv: setattr(kv.pool, "num_free", 3),
        lambda kv: kv.told.__setitem__((0, 0), 9),
    ):
        kv = manager()
        kv.grow(0, 8)
        kv.check()
        spoil(kv)
        with pytest.raises(InvariantError):
            kv.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 64)), max_size=60), st.integers(1, 3))
def test_random_growth_and_freeing_keep_the_books(moves: list[tuple[int, int]], groups: int) -> None:
    kv = manager(num_blocks=17, groups=groups)
    lengths = [0] * 4
    for row, tokens in moves:
        if tokens == 0:
            kv.free(row)
            lengths[row] = 0
        elif kv.grow(row, tokens):
            lengths[row] = max(lengths[row], tokens)
        kv.check()
        assert kv.num_free == 17 - sum(kv.blocks_for(length) for length in lengths)
