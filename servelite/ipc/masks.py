"""The masks that follow a plan: which tokens each of some rows may take.

Only rows that a grammar binds are in it. The frame: a word with their count, their resident rows, then a bit
mask for each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WORD = np.dtype("<u4")


def pack_masks(rows: npt.NDArray[np.int32], words: npt.NDArray[np.uint32]) -> bytes:
    """
    Args:
        rows: [rows], resident ones, in the plan's order.
        words: [rows, ceil(vocabulary / 32)]; bit i of a row's little-endian words is token i, 1 allows.
    """
    head = np.array([len(rows), *rows], WORD)
    return head.tobytes() + np.ascontiguousarray(words, WORD).tobytes()


def unpack_masks(frame: bytes) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """The rows, and their masks as bytes [rows, 4 * words], bits little-endian; read-only, no copy."""
    count = int(np.frombuffer(frame, WORD, 1)[0])
    rows = np.frombuffer(frame, np.dtype("<i4"), count, WORD.itemsize)
    masks = np.frombuffer(frame, np.uint8, -1, WORD.itemsize * (1 + count))
    return rows, masks.reshape(count, -1) if count else masks.reshape(0, 0)


def unpack_bits(masks: npt.NDArray[np.uint8], vocab_size: int) -> npt.NDArray[np.bool_]:
    """[rows, bytes] -> [rows, vocab_size]."""
    return np.unpackbits(masks, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)
