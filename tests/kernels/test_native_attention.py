"""The native CPU kernels: equal to plain torch on every instruction set, and the same bits in any batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from servelite.kernels import reference
from servelite.kernels.attention_batch import build_attention_batch
from servelite.kernels.cpu.isa import NEEDS, cpu_flags, library_path
from servelite.kernels.cpu.native import NativeKernels
from servelite.kernels.kv_layout import KVGroupSpec, KVPool
from tests.kernels.paged_scene import Row, Shape, lay_out, make_rows, part

F32, BF16 = torch.float32, torch.bfloat16
HALVES = [
    pytest.param(cache, query, id=f"{cache}-{query}"[6:]) for cache in (F32, BF16) for query in (F32, BF16)
]


@pytest.fixture(scope="module", params=list(NEEDS))
def native(request: pytest.FixtureRequest) -> NativeKernels:
    isa: str = request.param
    if lacking := NEEDS[isa] - cpu_flags():
        pytest.skip(f"this CPU has no {', '.join(sorted(lacking))}")
    if not library_path(isa):
        pytest.skip("the native kernels are not built")
    return NativeKernels(isa)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One, unless a test says otherwise: where the cores are taken, each parallel region waits for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def around_borders(block: int) -> list[tuple[int, int]]:
    """Decodes and chunks that end just before, at and just after block and tile borders."""
    ends = {end + d for end in (block, 3 * block, 128, 256) for d in (-1, 0, 1)}
    lengths = sorted(end for end in ends if end > 0)
    counts = [1 + i * 7 % length for i, length in enumerate(lengths)]
    decodes = [(length - 1, 1) for length in lengths]
    return [*decodes, *((end - count, count) for end, count in zip(lengths, counts, strict=True))]


def close(native: NativeKernels, shape: Shape, rows: Sequence[Row], tolerance: float) -> None:
    """Native over a cache full of NaN elsewhere against plain torch over one full of zeros."""
    found = native.paged_attention(*lay_out(shape, rows, stale=torch.nan))
    expected = reference.paged_attention(*lay_out(shape, rows))
    assert found.dtype == shape.query
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("block", [1, 8, 16, 32, 48])
@pytest.mark.parametrize("window", [0, 1, 33, 128])
def test_ragged_lengths_around_every_border(native: NativeKernels, block: int, window: int) -> None:
    shape = Shape(4, 2, 64, block, window)
    close(native, shape, make_rows(shape, around_borders(block)), 1e-5)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_head_sizes_and_groups(native: NativeKernels, dim: int) -> None:
    for group in (*range(1, 9), 71):
        for kv_heads, window in ((1, 0), (2, 100)):
            shape = Shape(group * kv_heads, kv_heads, dim, window=window)
            close(native, shape, make_rows(shape, [(0, 1), (200, 1), (0, 40), (150, 20)]), 1e-5)


@pytest.mark.parametrize("cache", [F32, BF16])
def test_any_other_head_size(native: NativeKernels, cache: torch.dtype) -> None:
    for dim in (1, 8, 16, 24, 40, 72, 80, 96, 112, 192, 512):
        shape = Shape(6, 2, dim, cache=cache)
        close(native, shape, make_rows(shape, [(130, 1), (0, 20), (100, 40)]), 1e-5)


@pytest.mark.parametrize(("cache", "query"), HALVES)
def test_bfloat16(native: NativeKernels, cache: torch.dtype, query: torch.dtype) -> None:
    """Sums are in float32 whatever the types: of the same rounded values only the result is rounded.

    So against plain torch in float32 on those values, 1e-5, and for a bfloat16 result half a unit in its
    last place more.
    """
    sizes = [(127, 1), (500, 1), (0, 70), (300, 33)]
    for window, dim in itertools.product((0, 90), (64, 256)):
        shape = Shape(8, 2, dim, window=window, cache=cache, query=query)
        rows = make_rows(shape, sizes)
        found = native.paged_attention(*lay_out(shape, rows, stale=torch.nan))
        q, kv, batch, scale = lay_out(shape, rows)
        expected = reference.paged_attention(q.float(), kv, batch, scale)
        relative = 0.0 if query == F32 else 2.0**-8
        torch.testing.assert_close(found.float(), expected, rtol=relative, atol=1e-5)


def bits(native: NativeKernels, shape: Shape, rows: Sequence[Row], seed: int = 0) -> list[Tensor]:
    """The results of each row."""
    out = native.paged_attention(*lay_out(shape, rows, stale=torch.nan, seed=seed))
    return list(out.split([row.count for row in rows]))


@pytest.mark.parametrize(("cache", "query"), HALVES)
@pytest.mark.parametrize("window", [0, 150])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 256), (3, 3, 64), (9, 3, 72)])
def test_the_same_bits_in_any_chunk_batch_order_and_thread_count(
    native: NativeKernels,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
    cache: torch.dtype,
    query: torch.dtype,
) -> None:
    shape = Shape(heads, kv_heads, dim, window=window, cache=cache, query=query)
    (row,) = make_rows(shape, [(0, 420)])
    torch.set_num_threads(1)
    (whole,) = bits(native, shape, [row])
    others = make_rows(shape, [(40, 1), (0, 33), (290, 9)], seed=1)
    done = 0
    for i, count in enumerate([1, 30, 97, 1, 1, 126, 2, 64, 1, 96, 1]):
        torch.set_num_threads(1 + i % 3)
        step = part(row, done, count)
        (alone,) = bits(native, shape, [step], seed=i)
        assert torch.equal(alone, whole[done : done + count])
        among = bits(native, shape, [*others[: i % 4], step, *others[i % 4 :]], seed=i)[i % 4]
        assert torch.equal(among, alone)
        done += count
    assert done == len(whole)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(bits(native, shape, [row])[0], whole)


@pytest.mark.parametrize("cache", [F32, BF16])
@pytest.mark.parametrize("window", [0, 1000])
def test_the_same_bits_where_a_rows_tiles_are_divided_over_threads(
    native: NativeKernels, window: int, cache: torch.dtype
) -> None:
    """One long row is more work than one thread should do alone."""
    shape = Shape(8, 1, 128, window=window, cache=cache)
    (row,) = make_rows(shape, [(0, 3000)])
    for count in (1, 2, 40):
        step = part(row, 3000 - count, count)
        results = []
        for threads in (1, 2, 3, 4, 7):
            torch.set_num_threads(threads)
            results += bits(native, shape, [step])
        assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(bits(native, shape, [part(row, 2990, 10)])[0], results[0][-10:])


def test_a_value_that_is_not_finite_stays_in_its_own_row(native: NativeKernels) -> None:
    shape = Shape(4, 2, 64)
    rows = make_rows(shape, [(50, 1), (30, 20), (300, 1)])
    clean = bits(native, shape, rows)
    rows[1].values[35] = torch.nan  # a token of the chunk; those before it do not see it
    rows[2].keys[10, 1] = torch.inf
    found = bits(native, shape, rows)
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[1][:5], clean[1][:5]) and found[1][5:].isnan().all()
    assert torch.equal(found[2][:, :2], clean[2][:, :2]) and found[2][:, 2:].isnan().all()


def test_scores_far_apart_and_very_large(native: NativeKernels) -> None:
    shape = Shape(2, 1, 64)
    (row,) = make_rows(shape, [(300, 1)])
    row.keys[:200] *= 400
    close(native, shape, [row], 1e-4)
    row.keys[:] = -abs(row.keys) * 1e4
    row.query[:] = abs(row.query)
    close(native, shape, [row], 1e-4)


def test_padding_gives_zeros(native: NativeKernels) -> None:
    shape = Shape(4, 2, 64)
    query, cache, batch, scale = lay_out(shape, make_rows(shape, [(20, 1), (0, 4)]))
    padded = torch.cat((query, torch.full((3, 4, 64), torch.nan)))
    out = native.paged_attention(padded, cache, batch, scale)
    assert torch.equal(out[:5], native.paged_attention(query, cache, batch, scale))
    assert not out[5:].any()


def test_a_query_that_is_a_part_of_a_wider_tensor(native: NativeKernels) -> None:
    shape = Shape(4, 2, 64)
    query, cache, batch, scale = lay_out(shape, make_rows(shape, [(20, 1), (0, 4)]))
    wide = torch.cat((query, query), dim=1)[:, :4]
    assert not wide.is_contiguous()
    assert torch.equal(
        native.paged_attention(wide, cache, batch, scale), native.paged_attention(query, cache, batch, scale)
    )


def test_a_step_of_nothing(native: NativeKernels) -> None:
    batch = build_attention_batch(np.array([0]), np.array([], np.int64), np.zeros((0, 1), np.int32), 16)
    cache = KVPool((KVGroupSpec("full", (0,), 2, 64),), 1, 16).layers[0]
    assert native.paged_attention(torch.empty(0, 4, 64), cache, batch, 1.0).shape == (0, 4, 64)


@pytest.mark.parametrize(("cache", "states"), HALVES)
@pytest.mark.parametrize("dim", [5, 64])
def test_writing_equals_plain_torch_bit_for_bit(
    native: NativeKernels, cache: torch.dtype, states: torch.dtype, dim: int
) -> None:
    """Rounding to bfloat16 is to the nearest, ties to even; infinities and NaN survive."""
    torch.manual_seed(0)
    tables = np.array([[5, 0, 3], [2, 6, -1]], np.int32)
    batch = build_attention_batch(np.array([0, 9, 10]), np.array([3, 6]), tables, 4)
    both = torch.randn(10 + 2, 6, dim)  # two tokens of padding
    both[0, :, :5] = torch.tensor([torch.inf, -torch.inf, 1e-40, 1 + 2**-8, 3.4e38])
    both[9, 2, 0] = torch.nan
    keys, values = both.to(states)[:, 1:3], both.to(states)[:, 4:]
    caches = []
    for write in (native.write_kv, reference.write_kv):
        pool = KVPool((KVGroupSpec("full", (0, 1), 2, dim),), 7, 4, cache)
        for layer in pool.layers:
            layer.keys.fill_(3.25)
            layer.values.fill_(3.25)
        write(keys, values, pool.layers[1], batch)
        assert (pool.layers[0].keys == 3.25).all()
        caches.append(pool.layers[1])
    for name in ("keys", "values"):
        found, expected = (getattr(each, name) for each in caches)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
