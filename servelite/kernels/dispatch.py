"""The table of kernels, chosen once when a worker starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from servelite.kernels import reference
from servelite.kernels.attention_batch import AttentionBatch
from servelite.kernels.kv_layout import LayerCache

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation; `kernels/reference.py` says what each computes."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, LayerCache, AttentionBatch], None]
    paged_attention: Callable[[Tensor, LayerCache, AttentionBatch, float], Tensor]


REFERENCE = Kernels(
    name="reference",
    rms_norm=reference.rms_norm,
    silu_mul=reference.silu_mul,
    rope=reference.rope,
    write_kv=reference.write_kv,
    paged_attention=reference.paged_attention,
)


def choose_kernels(device: str) -> Kernels:
    """The kernels for `device`; the log says which and why."""
    _log.info("kernels: %s (plain torch, the only ones there are for %s)", REFERENCE.name, device)
    return REFERENCE
