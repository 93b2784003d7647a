"""Native paged attention beside plain torch (gather the blocks, then SDPA), one after the other in one run.

    python -m benchmarks.attention
    SERVELITE_ISA=avx2 python -m benchmarks.attention --threads 2 --shape 8b --repeats 30

Medians in milliseconds of one layer, and their ratio. A decode case is a batch of rows of equal context, a
prefill case one row's chunk after the context; the cache holds several layers and its blocks are scattered.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from servelite.kernels import reference
from servelite.kernels.attention_batch import AttentionBatch, build_attention_batch
from servelite.kernels.cpu.isa import PLAIN_TORCH, choose_isa, cpu_flags
from servelite.kernels.cpu.native import NativeKernels
from servelite.kernels.kv_layout import KVGroupSpec, KVPool, LayerCache

# Query heads, KV heads, head size.
SHAPES = {"gemma3-270m": (4, 1, 256), "8b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}
BLOCK, LAYERS = 16, 4


@dataclass(frozen=True)
class Case:
    """Rows of one context each, and how many tokens each of them computes."""

    name: str
    rows: int
    context: int
    tokens: int


DECODES = [Case(f"decode {rows} x {context}", rows, context, 1) for rows in (1, 8) for context in (128, 1024)]
PREFILLS = [Case(f"prefill 512 at {context}", 1, context, 512) for context in (0, 2048)]


def scene(
    shape: tuple[int, int, int], case: Case, pool_dtype: torch.dtype, query_dtype: torch.dtype
) -> tuple[Tensor, LayerCache, AttentionBatch, float]:
    """The arguments of `paged_attention`, one of a few layers' caches filled with noise."""
    heads, kv_heads, dim = shape
    random = np.random.default_rng(0)
    length = case.context + case.tokens - (case.tokens == 1)  # a decode's own token is of the context
    blocks = -(-length // BLOCK)
    spec = KVGroupSpec("full", tuple(range(LAYERS)), kv_heads, dim)
    pool = KVPool((spec,), case.rows * blocks, BLOCK, pool_dtype)
    cache = pool.layers[1]
    for part in (cache.keys, cache.values):
        part.copy_(torch.randn(part.shape))
    tables = random.permutation(case.rows * blocks).astype(np.int32).reshape(case.rows, blocks)
    starts = np.arange(case.rows + 1) * case.tokens
    batch = build_attention_batch(starts, np.full(case.rows, length - case.tokens), tables, BLOCK)
    query = torch.randn(int(starts[-1]), heads, dim).to(query_dtype)
    return query, cache, batch, dim**-0.5


def alternating(run: tuple[Callable[[], object], ...], repeats: int) -> list[float]:
    """Median milliseconds of each, measured in turns."""
    seconds: list[list[float]] = [[] for _ in run]
    for repeat in range(repeats + 2):
        for one, times in zip(run, seconds, strict=True):
            began = time.perf_counter()
            one()
            if repeat >= 2:  # the first calls make the masks and the intermediates' room
                times.append(time.perf_counter() - began)
    return [statistics.median(times) * 1e3 for times in seconds]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    isa, _ = choose_isa(os.environ, cpu_flags())
    if isa == PLAIN_TORCH:
        parser.error("the native kernels are not built, or not wanted: there is nothing to compare")
    native = NativeKernels(isa)
    print(f"{isa}, {given.threads} threads, medians of {given.repeats} in ms")
    print(f"{'shape':>13} {'case':>20} {'cache':>9} {'query':>9} {'torch':>9} {'native':>9} {'ratio':>6}")
    for name in given.shape:
        for case in DECODES + PREFILLS:
            for pool, query in (
                (torch.bfloat16, torch.bfloat16),
                (torch.bfloat16, torch.float32),
                (torch.float32, torch.float32),
            ):
                args = scene(SHAPES[name], case, pool, query)
                torch_ms, native_ms = alternating(
                    (partial(reference.paged_attention, *args), partial(native.paged_attention, *args)),
                    given.repeats,
                )
                kinds = " ".join(f"{str(kind).removeprefix('torch.'):>9}" for kind in (pool, query))
                ratio = torch_ms / native_ms
                print(f"{name:>13} {case.name:>20} {kinds} {torch_ms:9.3f} {native_ms:9.3f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
