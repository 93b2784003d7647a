"""Philox4x32-10, the counter-based random function behind every draw, and the Gumbel noise made of it.

One integer code serves NumPy arrays and torch tensors: both wrap 64-bit products, and the low and
high halves are taken out by shift and mask. Nothing here imports torch, and there is no state: the
noise of a token is a function of (seed, token ID, output position, choice), so neither the batch, a
preemption, a restart nor the number of ranks can change a draw.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the test vectors are
Random123's.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10

GUMBEL_LARGEST: Final = 16.65
"""Above any Gumbel noise: u is at most 1 - 2^-24."""


def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """The four output words of counter (c0..c3) under key (k0, k1).

    All are int64 arrays or tensors (of one kind) that hold unsigned 32-bit values, and broadcast.
    """
    for _ in range(_ROUNDS):
        # Products wrap, and c1, c3 and the key run past 32 bits: a word is cut to 32 bits only where
        # its upper half would matter, as a factor.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 ^ c1 ^ k0) & _MASK, p1, (p0 >> 32 ^ c3 ^ k1) & _MASK, p0
        k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return c0, c1 & _MASK, c2, c3 & _MASK


def _noise_words(tokens: Any, positions: Any, choices: Any, seeds: Any) -> Any:
    """23 random bits a token, int64. `seeds` holds the 64 bits as int64, sign and all."""
    zero = tokens * 0
    word = philox4x32(tokens, positions, choices, zero, seeds & _MASK, seeds >> 32 & _MASK)[0]
    return word >> 9


def gumbel_numpy(
    tokens: npt.ArrayLike, positions: npt.ArrayLike, choices: npt.ArrayLike, seeds: npt.ArrayLike
) -> npt.NDArray[np.float32]:
    """Gumbel noise of tokens at output positions; the arguments broadcast.

    Args:
        seeds: 64-bit integers, as uint64, or as int64 with the same bits.
    """
    seed = np.atleast_1d(np.asarray(seeds))
    seed = seed.view(np.int64) if seed.dtype == np.uint64 else seed.astype(np.int64)
    bits = _noise_words(_column(tokens), _column(positions), _column(choices), seed)
    # Half a step off the grid's ends: u is strictly inside (0, 1), and exact in float32.
    u = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
    return -np.log(-np.log(u))


def _column(values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    return np.atleast_1d(np.asarray(values, np.int64))


def gumbel_torch(tokens: Any, positions: Any, choices: Any, seeds: Any) -> Any:
    """As `gumbel_numpy`, of int64 torch tensors on any device, to float32."""
    u = (_noise_words(tokens, positions, choices, seeds).float() + 0.5) * 2**-23
    return -(-u.log()).log()
