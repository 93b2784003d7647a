"""GGML's block formats to float32, vectorised.

A block is 32 weights (the K types: 256, in sub-blocks of 32 or 16 with small scales of their own). A
weight is its integer q times a scale d, some with an offset m: `d * q`, `d * (q - 8)` or `d * q + m`. In
the types of four bits and more, byte i of a part holds one weight in its low half and a later one in its
high half; further bits of q lie apart, packed by four or eight.
Source of the layouts: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from servelite.tokenizer.gguf import BLOCK, GGMLType

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

_TILE = 1 << 19  # weights at once: intermediate arrays stay within the processor's cache


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
    tile = _TILE // elements
    for begin in range(0, len(blocks), tile):
        convert(blocks[begin : begin + tile], weights[begin : begin + tile])


def _f32(raw: _Bytes, out: _Floats) -> None:
    out[:] = raw.view("<f4")


def _f16(raw: _Bytes, out: _Floats) -> None:
    out[:] = raw.view("<f2")


def _bf16(raw: _Bytes, out: _Floats) -> None:
    np.left_shift(raw.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


# ---------------------------------------------------------------- blocks of 32


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


def _q5_0(blocks: _Bytes, out: _Floats) -> None:
    _five_bits(blocks[:, 6:], blocks[:, 2:6], out)
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks: _Bytes, out: _Floats) -> None:
    _five_bits(blocks[:, 8:], blocks[:, 4:8], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _half(blocks: _Bytes, at: int) -> _Floats:
    """The float16 at byte `at` of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: _Bytes, out: npt.NDArray[np.float32 | np.uint8]) -> None:
    """[blocks, n] bytes -> [blocks, 2n] integers of 0 to 15: the low halves, then the high ones."""
    half = packed.shape[1]
    out[:, :half] = packed & 15
    out[:, half:] = packed >> 4


def _five_bits(packed: _Bytes, fifth: _Bytes, out: _Floats) -> None:
    """As `_nibbles`, with bit i of the 32 in `fifth` [blocks, 4] as weight i's highest."""
    whole = np.unpackbits(fifth, axis=1, bitorder="little")
    np.left_shift(whole, 4, out=whole)
    whole[:, :16] |= packed & 15
    whole[:, 16:] |= packed >> 4
    out[:] = whole


# ---------------------------------------------------------------- K: blocks of 256


def _q2_k(blocks: _Bytes, out: _Floats) -> None:
    scales, packed = blocks[:, :16], blocks[:, 16:80]
    _two_bits(packed, out)
    weights = out.reshape(-1, 16, 16)
    weights *= (_half(blocks, 80) * (scales & 15))[:, :, None]
    weights -= (_half(blocks, 82) * (scales >> 4))[:, :, None]


def _q3_k(blocks: _Bytes, out: _Floats) -> None:
    """The third bit is stored inverted: a 0 takes 4 away. Scales are six bits: 16 low halves, then 16
    pairs of bits, byte i % 4 holding those of scales i, i + 4, i + 8 and i + 12."""
    high, packed, small = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    scales = np.empty((len(blocks), 16), np.uint8)
    _nibbles(small[:, :8], scales)
    for part in range(4):
        scales[:, 4 * part : 4 * part + 4] |= ((small[:, 8:] >> (2 * part)) & 3) << 4
    _two_bits(packed, out)
    out.reshape(-1, 8, 32)[:] -= 4 - 4 * _bit_planes(high, 8).astype(np.float32)
    out.reshape(-1, 16, 16)[:] *= (_half(blocks, 108) * (scales.astype(np.float32) - 32))[:, :, None]


def _q4_k(blocks: _Bytes, out: _Floats) -> None:
    out.reshape(-1, 8, 32)[:] = _paired_nibbles(blocks[:, 16:], 4)
    _scale_and_offset(blocks, out)


def _q5_k(blocks: _Bytes, out: _Floats) -> None:
    whole = _paired_nibbles(blocks[:, 48:], 4)
    whole |= _bit_planes(blocks[:, 16:48], 8) << 4
    out.reshape(-1, 8, 32)[:] = whole
    _scale_and_offset(blocks, out)


def _q6_k(blocks: _Bytes, out: _Floats) -> None:
    low, high, scales = blocks[:, :128], blocks[:, 128:192], blocks[:, 192:208].view(np.int8)
    whole = np.empty((len(blocks), 2, 4, 32), np.uint8)
    nibbles = low.reshape(-1, 2, 2, 32)
    whole[:, :, :2] = nibbles & 15
    whole[:, :, 2:] = nibbles >> 4
    pairs = high.reshape(-1, 2, 32)
    for part in range(4):
        whole[:, :, part] |= ((pairs >> (2 * part)) & 3) << 4
    out[:] = whole.reshape(-1, 256)
    out -= 32
    weights = out.reshape(-1, 16, 16)
    weights *= (_half(blocks, 208) * scales)[:, :, None]


def _two_bits(packed: _Bytes, out: _Floats) -> None:
    """[blocks, 64] bytes -> [blocks, 256]: each half's 32 bytes hold four runs of 32 weights, low bits
    first."""
    halves, runs = packed.reshape(-1, 2, 32), out.reshape(-1, 2, 4, 32)
    for part in range(4):
        runs[:, :, part] = (halves >> (2 * part)) & 3


def _paired_nibbles(packed: _Bytes, pairs: int) -> _Bytes:
    """[blocks, 32 * pairs] bytes -> [blocks, 2 * pairs, 32]: a run of low halves, one of high ones."""
    whole = np.empty((len(packed), pairs, 2, 32), np.uint8)
    parts = packed.reshape(-1, pairs, 32)
    np.bitwise_and(parts, 15, out=whole[:, :, 0])
    np.right_shift(parts, 4, out=whole[:, :, 1])
    return whole.reshape(-1, 2 * pairs, 32)


def _bit_planes(packed: _Bytes, count: int) -> _Bytes:
    """[blocks, 32] bytes -> [blocks, count, 32] of 0 and 1: bit s of byte i belongs to weight i of run s."""
    shifts = np.arange(count, dtype=np.uint8)
    planes: _Bytes = np.right_shift(packed[:, None, :], shifts[None, :, None])
    return np.bitwise_and(planes, 1, out=planes)


def _scale_and_offset(blocks: _Bytes, out: _Floats) -> None:
    """Q4_K and Q5_K: eight pairs of six-bit scales and offsets in 12 bytes, times d and dmin."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (rest & 15) | ((first >> 6) << 4)), axis=1)
    offsets = np.concatenate((second & 63, (rest >> 4) | ((second >> 6) << 4)), axis=1)
    weights = out.reshape(-1, 8, 32)
    weights *= (_half(blocks, 0) * scales)[:, :, None]
    weights -= (_half(blocks, 2) * offsets)[:, :, None]


_CONVERTERS: dict[GGMLType, Callable[[_Bytes, _Floats], None]] = {
    GGMLType.F32: _f32, GGMLType.F16: _f16, GGMLType.BF16: _bf16,
    GGMLType.Q8_0: _q8_0, GGMLType.Q4_0: _q4_0, GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0, GGMLType.Q5_1: _q5_1,
    GGMLType.Q2_K: _q2_k, GGMLType.Q3_K: _q3_k, GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k, GGMLType.Q6_K: _q6_k,
}  # fmt: skip
SUPPORTED = tuple(_CONVERTERS)
"""The types `dequantize` knows."""
