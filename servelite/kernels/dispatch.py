"""The table of kernels, chosen once when a worker starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from servelite.kernels import reference
from servelite.kernels.attention_batch import AttentionBatch
from servelite.kernels.cpu.isa import PLAIN_TORCH, choose_isa, cpu_flags
from servelite.kernels.cpu.native import NativeKernels
from servelite.kernels.kv_layout import LayerCache

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation; `kernels/reference.py` says what each computes."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    gelu_tanh_mul: Callable[[Tensor], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, LayerCache, AttentionBatch], None]
    paged_attention: Callable[[Tensor, LayerCache, AttentionBatch, float], Tensor]
    full_attention: Callable[[Tensor, Tensor, Tensor, AttentionBatch, float], Tensor]


REFERENCE = Kernels(
    name="reference",
    rms_norm=reference.rms_norm,
    silu_mul=reference.silu_mul,
    gelu_tanh_mul=reference.gelu_tanh_mul,
    rope=reference.rope,
    write_kv=reference.write_kv,
    paged_attention=reference.paged_attention,
    full_attention=reference.full_attention,
)


def choose_kernels(device: str, environ: Mapping[str, str] = os.environ) -> Kernels:
    """The kernels for `device`; the log says which and why.

    Raises:
        SettingError: the environment asks for an instruction set that cannot be had.
    """
    isa, why = choose_isa(environ, cpu_flags())
    if isa != PLAIN_TORCH:
        try:
            native = NativeKernels(isa)
        except OSError as error:
            isa, why = PLAIN_TORCH, str(error)
        else:
            _log.info("kernels: native attention for %s (%s); plain torch for the rest", isa, why)
            return replace(
                REFERENCE,
                name=f"native {isa}",
                write_kv=native.write_kv,
                paged_attention=native.paged_attention,
            )
    _log.warning(
        "kernels: plain torch for %s, no native attention (%s); attention takes 2 to 5 times longer",
        device, why,
    )  # fmt: skip
    return REFERENCE
