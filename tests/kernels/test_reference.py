"""The plain-torch kernels against definitions written out, and attention against one row at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from servelite.kernels import reference
from servelite.kernels.attention_batch import build_attention_batch
from servelite.kernels.kv_layout import KVGroupSpec, KVPool

BLOCK = 4
KV_HEADS, DIM = 2, 8


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 16), torch.randn(16)
    expected = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), expected)


def test_silu_mul() -> None:
    gate, up = torch.randn(5, 7), torch.randn(5, 7)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(reference.silu_mul(torch.cat((gate, up), dim=-1)), expected)


def test_rope_rotates_each_pair_by_its_angle() -> None:
    x, angles = torch.randn(3, 2, 6), torch.randn(3, 3)
    cos, sin = angles.cos(), angles.sin()
    out = reference.rope(x, torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
    pairs = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones(3, 1, 3), angles[:, None])
    torch.testing.assert_close(out, torch.cat((pairs.real, pairs.imag), dim=-1))


def one_row(query: Tensor, keys: Tensor, values: Tensor, window: int = 0) -> Tensor:
    """Attention of the last len(query) positions, a token and a head at a time."""
    out = torch.empty_like(query)
    group = query.shape[1] // keys.shape[1]
    for i in range(len(query)):
        end = len(keys) - len(query) + i + 1
        seen = slice(max(0, end - window) if window else 0, end)
        for head in range(query.shape[1]):
            scores = keys[seen, head // group] @ query[i, head] / math.sqrt(query.shape[2])
            out[i, head] = torch.softmax(scores, dim=0) @ values[seen, head // group]
    return out


@given(
    rows=st.lists(st.tuples(st.integers(0, 45), st.integers(1, 9)), min_size=1, max_size=7),
    decodes=st.integers(0, 7),
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([0, 1, 2, 4, 5, 11, 100]),
    seed=st.integers(0, 1000),
)
def test_a_mixed_batch_equals_its_rows_alone(
    rows: list[tuple[int, int]], decodes: int, group: int, window: int, seed: int
) -> None:
    """Rows are (tokens in the cache, tokens computed); the first `decodes` compute one token each.

    Table entries out of the window say block 0, which is another's and holds NaN.
    """
    torch.manual_seed(seed)
    computed = np.array([done for done, _ in rows])
    counts = np.array([1 if i < decodes else n for i, (_, n) in enumerate(rows)])
    needed = -(-(computed + counts) // BLOCK)
    pool = KVPool((KVGroupSpec("full", (0, 1), KV_HEADS, DIM),), 1 + int(needed.sum()), BLOCK)
    pool.zero(torch.arange(1 + int(needed.sum())))
    blocks = 1 + np.random.default_rng(seed).permutation(needed.sum()).astype(np.int32)
    tables = np.full((len(rows), needed.max()), -1, np.int32)  # what is past a row's end is never read
    for i, table in enumerate(np.split(blocks, np.cumsum(needed)[:-1])):
        tables[i, : len(table)] = table
    keys = [torch.randn(d + n, KV_HEADS, DIM) for d, n in zip(computed, counts, strict=True)]
    values = [torch.randn_like(key) for key in keys]
    # What was computed before goes in token by token, as a batch of its own for each row.
    cache = pool.layers[1]
    for i, done in enumerate(computed):
        if done:
            earlier = build_attention_batch(np.array([0, done]), np.array([0]), tables[i : i + 1], BLOCK)
            reference.write_kv(keys[i][:done], values[i][:done], cache, earlier)
    starts = np.concatenate(([0], np.cumsum(counts)))
    for i, done in enumerate(computed):
        lost = max(0, done - window + 1) // BLOCK if window else 0
        for other in (cache.keys, cache.values):
            other[torch.from_numpy(np.append(tables[i, :lost], 0).astype(np.int64))] = torch.nan
        tables[i, :lost] = 0
    batch = build_attention_batch(starts, computed, tables, BLOCK, window)
    query = torch.randn(int(starts[-1]), KV_HEADS * group, DIM)
    fresh_keys = torch.cat([key[done:] for key, done in zip(keys, computed, strict=True)])
    fresh_values = torch.cat([value[done:] for value, done in zip(values, computed, strict=True)])
    reference.write_kv(fresh_keys, fresh_values, cache, batch)
    out = reference.paged_attention(query, cache, batch, DIM**-0.5)
    for i in range(len(rows)):
        part = slice(int(starts[i]), int(starts[i + 1]))
        torch.testing.assert_close(out[part], one_row(query[part], keys[i], values[i], window))
    assert not pool.layers[0].keys.any(), "another layer's cache was written"


def test_decodes_of_very_different_lengths_go_to_buckets_of_like_length() -> None:
    lengths = np.array([3, 900, 5, 60, 880, 2, 70])
    tables = np.arange(7 * 225, dtype=np.int32).reshape(7, 225)
    batch = build_attention_batch(np.arange(8), lengths - 1, tables, BLOCK)
    members = [bucket.tokens.tolist() for bucket in batch.decodes if bucket.tokens is not None]
    assert sorted(row for part in members for row in part) == list(range(7))
    assert set(members[0]) == {1, 4}
    assert len(members) == 2, "the short rows' padding is too small to be worth another bucket"
    for bucket, rows in zip(batch.decodes, members, strict=True):
        longest = -(-lengths[rows].max() // BLOCK)
        assert bucket.blocks.shape == (len(rows) * longest,)
        assert bucket.mask.shape == (len(rows), 1, 1, longest * BLOCK)
        assert (bucket.mask == 0).sum(dim=-1).flatten().tolist() == lengths[rows].tolist()


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=60))
def test_buckets_waste_little_and_are_few(lengths: list[int]) -> None:
    array = np.array(lengths)
    tables = np.zeros((len(array), 1000), np.int32)
    batch = build_attention_batch(np.arange(len(array) + 1), array - 1, tables, BLOCK)
    assert len(batch.decodes) <= 10
    padded = sum(len(bucket.blocks) for bucket in batch.decodes) * BLOCK
    assert padded <= 2 * int((-(-array // BLOCK) * BLOCK).sum()) + 2048


def test_a_steady_batch_of_decodes_is_one_bucket_in_order() -> None:
    batch = build_attention_batch(np.arange(4), np.array([5, 9, 7]), np.zeros((3, 3), np.int32), BLOCK)
    assert [bucket.tokens for bucket in batch.decodes] == [None]
    assert batch.prefills == ()


def test_a_stale_value_past_a_rows_end_cannot_leak_once_its_block_is_cleared() -> None:
    spec = KVGroupSpec("full", (0,), KV_HEADS, DIM)
    pool = KVPool((spec,), 2, BLOCK)
    pool.layers[0].keys.fill_(torch.nan)
    pool.layers[0].values.fill_(torch.nan)
    pool.zero(torch.tensor([1]))
    batch = build_attention_batch(np.array([0, 1]), np.array([0]), np.array([[1]], np.int32), BLOCK)
    key, value = torch.randn(1, KV_HEADS, DIM), torch.randn(1, KV_HEADS, DIM)
    reference.write_kv(key, value, pool.layers[0], batch)
    out = reference.paged_attention(torch.randn(1, KV_HEADS, DIM), pool.layers[0], batch, 1.0)
    torch.testing.assert_close(out, value)
    assert pool.layers[0].keys[0].isnan().all(), "a block that was not named was cleared"


def test_copied_blocks_are_equal_and_others_untouched() -> None:
    pool = KVPool((KVGroupSpec("full", (0, 1), KV_HEADS, DIM),), 4, BLOCK)
    for layer in pool.layers:
        layer.keys.copy_(torch.randn_like(layer.keys))
        layer.values.copy_(torch.randn_like(layer.values))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in pool.layers]
    pool.copy(torch.tensor([0, 2]), torch.tensor([3, 1]))
    for layer, (keys, values) in zip(pool.layers, before, strict=True):
        torch.testing.assert_close(layer.keys, keys[[0, 2, 2, 0]], rtol=0, atol=0)
        torch.testing.assert_close(layer.values, values[[0, 2, 2, 0]], rtol=0, atol=0)


def test_the_pools_blocks_have_the_bytes_they_are_said_to_have() -> None:
    spec = KVGroupSpec("full", (0, 1, 2), KV_HEADS, DIM)
    pool = KVPool((spec,), 5, BLOCK)
    held = sum(t.numel() * t.element_size() for layer in pool.layers for t in (layer.keys, layer.values))
    assert held == 5 * spec.block_bytes(BLOCK, torch.float32)


def test_one_pool_of_block_ids_serves_all_groups() -> None:
    """A block is one group's at a time, in whatever group: writing it there spoils no other block."""
    specs = (KVGroupSpec("full", (0, 2), KV_HEADS, DIM), KVGroupSpec("window", (1, 3), KV_HEADS, DIM, 8))
    pool = KVPool(specs, 3, BLOCK)
    pool.zero(torch.arange(3))
    pool.layers[2].values[1] = 5
    pool.layers[3].values[2] = 7
    assert (
        sorted(pool.layers[0].keys.untyped_storage().nbytes() for _ in specs)
        == [3 * specs[0].block_bytes(BLOCK, torch.float32)] * 2
    )
    assert (pool.layers[2].values[1] == 5).all() and (pool.layers[3].values[2] == 7).all()
    for layer in (0, 2):
        assert not pool.layers[layer].keys[[0, 1]].any() and not pool.layers[layer].values[0].any()
    assert not pool.layers[1].values.any(dim=-1)[[0, 2]].any()
    pool.zero(torch.tensor([1]))
    assert not pool.layers[2].values[1].any() and (pool.layers[3].values[2] == 7).all()


def test_a_decode_in_a_window_gathers_only_the_blocks_it_sees() -> None:
    tables = np.arange(2 * 250, dtype=np.int32).reshape(2, 250)
    batch = build_attention_batch(np.arange(3), np.array([900, 5]), tables, BLOCK, window=9)
    (bucket,) = batch.decodes
    # Position 900 sees 892 to 900, in blocks 223 to 225; position 5 sees all of its two.
    assert bucket.blocks.view(2, 3).tolist() == [[223, 224, 225], [250, 251, 251]]
    seen = (bucket.mask == 0).view(2, 12)
    assert [torch.nonzero(row).flatten().tolist() for row in seen] == [list(range(9)), list(range(6))]


def test_a_chunk_in_a_window_gathers_only_the_blocks_it_sees() -> None:
    tables = np.arange(250, dtype=np.int32)[None]
    (chunk,) = build_attention_batch(np.array([0, 6]), np.array([101]), tables, BLOCK, window=10).prefills
    assert chunk.blocks.tolist() == [23, 24, 25, 26]  # 92 to 106
    assert chunk.context == 107 - 92
    assert chunk.mask is not None
    for i, line in enumerate(chunk.mask):
        assert (torch.nonzero(line == 0).flatten() + 92).tolist() == list(range(92 + i, 102 + i))


def test_groups_of_unlike_blocks_are_refused() -> None:
    specs = (KVGroupSpec("full", (0,), 2, 8), KVGroupSpec("window", (1, 2), 2, 8, window=64))
    with pytest.raises(ValueError, match=r"\[512, 1024\] bytes"):
        KVPool(specs, 4, BLOCK)


def test_full_attention_is_softmax_over_the_rows_own_tokens() -> None:
    """By its formula, row by row; what follows the step's tokens is padding."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(12, 3, 8) for _ in range(3))
    starts = np.array([0, 4, 5, 10])
    batch = build_attention_batch(starts, np.zeros(3), np.zeros((3, 1)), BLOCK)
    found = reference.full_attention(query, key, value, batch, scale=0.3)
    for start, stop in itertools.pairwise(starts.tolist()):
        weights = torch.einsum("qhd,khd->hqk", query[start:stop], key[start:stop]).mul(0.3).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, value[start:stop])
        torch.testing.assert_close(found[start:stop], expected)
    assert not found[10:].any()
