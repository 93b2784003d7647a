"""The one device abstraction: a step's computation is recorded once, then replayed for every step.

A device that replays (a CUDA graph, a native tape) needs inputs at fixed addresses and of fixed sizes:
so a step's tokens are written into preallocated buffers, padded up to the next of a few sizes, the
buckets. On the CPU, with plain torch, a replay is a plain call and every size its own bucket; the same
code then runs without padding.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from servelite.kernels.attention_batch import AttentionBatch


@dataclass(frozen=True)
class StepBuffers:
    """The token inputs of one replay. What is past the step's own tokens is padding."""

    token_ids: Tensor  # int64 [bucket]
    positions: Tensor  # int64 [bucket]


Computation = Callable[[StepBuffers, tuple[AttentionBatch, ...]], Tensor]
"""From buffers and an attention batch for each KV group, which covers the step's own tokens only, to
[bucket, any]."""


class Recorded(Protocol):
    """A computation that can be replayed."""

    def __call__(self, token_ids: Tensor, positions: Tensor, batches: tuple[AttentionBatch, ...]) -> Tensor:
        """Compute one step's tokens (both int64 [tokens]).

        Returns:
            [tokens, any], valid until the next call.
        """


class Device(Protocol):
    """Where a model runner computes."""

    def record(self, compute: Computation) -> Recorded:
        """Make `compute` replayable. It must do the same work for equal bucket sizes, and keep nothing."""


class CPUDevice:
    """A `Device` of plain calls."""

    def __init__(self, ladder: Sequence[int] = ()) -> None:
        """`ladder`: bucket sizes in tokens; a step beyond the largest is a bucket of its own."""
        self._ladder = sorted(ladder)

    def record(self, compute: Computation) -> Recorded:
        return _PlainCalls(compute, self._ladder)


class _PlainCalls:
    def __init__(self, compute: Computation, ladder: Sequence[int]) -> None:
        self._compute, self._ladder = compute, ladder
        self._all = StepBuffers(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))

    def __call__(self, token_ids: Tensor, positions: Tensor, batches: tuple[AttentionBatch, ...]) -> Tensor:
        tokens = len(token_ids)
        buffers = self._buffers(tokens)
        for buffer, values in ((buffers.token_ids, token_ids), (buffers.positions, positions)):
            buffer[:tokens] = values
            buffer[tokens:] = 0
        return self._compute(buffers, batches)[:tokens]

    def _buffers(self, tokens: int) -> StepBuffers:
        """Those of the smallest bucket that holds `tokens`: the beginning of the largest one's."""
        at = bisect.bisect_left(self._ladder, tokens)
        bucket = self._ladder[at] if at < len(self._ladder) else tokens
        if bucket > len(self._all.token_ids):
            self._all = StepBuffers(*(torch.zeros(bucket, dtype=torch.int64) for _ in range(2)))
        return StepBuffers(self._all.token_ids[:bucket], self._all.positions[:bucket])
