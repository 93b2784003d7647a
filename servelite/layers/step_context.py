"""What a forward pass knows of its step. Passed as an argument, never kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from servelite.kernels.attention_batch import AttentionBatch
from servelite.kernels.kv_layout import LayerCache


def _unwatched() -> None:
    """Nobody asks whether the step moves."""


@dataclass(frozen=True)
class StepContext:
    positions: Tensor  # int64 [tokens], each token's place in its own sequence
    batches: tuple[AttentionBatch, ...]  # by KV group
    caches: tuple[LayerCache, ...]  # by layer
    beat: Callable[[], None] = _unwatched  # called once a layer: a step of minutes is no hang
