"""GGML's block formats to float32, vectorised.

A quantised block is 32 weights: a float16 scale d (Q4_1: and an offset m), then the integers q; a
weight is d * q, d * (q - 8) or d * q + m. In the four-bit types byte i holds weight i in its low half
and weight i + 16 in its high half.
Source of the layouts: ggml's `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from servelite.tokenizer.gguf import BLOCK, GGMLType

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

_TILE = 1 << 14  # blocks at once: intermediate arrays stay within the processor's cache


def dequantize(kind: GGMLType, raw: _Bytes, out: _Floats) -> None:
    """Write the weights in `raw` (a tensor's bytes, whole blocks) to `out`, flat and contiguous.

    Raises:
        KeyError: `kind` is not in `SUPPORTED`.
    """
    convert = _CONVERTERS[kind]
    elements, size = BLOCK[kind]
    if elements == 1:
        convert(raw, out)
        return
    blocks, weights = raw.reshape(-1, size), out.reshape(-1, elements)
    for begin in range(0, len(blocks), _TILE):
        convert(blocks[begin : begin + _TILE], weights[begin : begin + _TILE])


def _f32(raw: _Bytes, out: _Floats) -> None:
    out[:] = raw.view("<f4")


def _f16(raw: _Bytes, out: _Floats) -> None:
    out[:] = raw.view("<f2")


def _bf16(raw: _Bytes, out: _Floats) -> None:
    np.left_shift(raw.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q8_0(blocks: _Bytes, out: _Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _q4_0(blocks: _Bytes, out: _Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: _Bytes, out: _Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _half(blocks: _Bytes, at: int) -> _Floats:
    """The float16 at byte `at` of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: _Bytes, out: _Floats) -> None:
    """[blocks, 16] bytes -> [blocks, 32] integers of 0 to 15, as floats."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


_CONVERTERS: dict[GGMLType, Callable[[_Bytes, _Floats], None]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
}
SUPPORTED = tuple(_CONVERTERS)
"""The types `dequantize` knows."""
