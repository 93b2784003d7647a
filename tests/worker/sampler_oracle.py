"""The sampler in float64 NumPy, a row at a time, with no shortcut; and how close its call was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MASK = 2**32 - 1


@dataclass(frozen=True)
class Row:
    """One row's parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0
    allowed: tuple[int, ...] | None = None  # of the grammar's mask; None: all
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


def philox(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """First output word of Philox4x32-10; `counter` [n, 4] uint64."""
    c = [counter[:, i].copy() for i in range(4)]
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high0, high1 = p0 >> np.uint64(32), p1 >> np.uint64(32)
        c = [
            high1 ^ c[1] ^ np.uint64(k0),
            p1 & np.uint64(_MASK),
            high0 ^ c[3] ^ np.uint64(k1),
            p0 & np.uint64(_MASK),
        ]
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c[0]


def gumbel(tokens: npt.NDArray[np.int64], row: Row) -> npt.NDArray[np.float64]:
    """The noise of `tokens`, in float64 from the same 23 bits."""
    counter = np.zeros((len(tokens), 4), np.uint64)
    counter[:, 0], counter[:, 1], counter[:, 2] = tokens, row.position, row.choice
    word = philox(counter, (row.seed & _MASK, row.seed >> 32))
    u = ((word >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23
    return -np.log(-np.log(u))


def only(z: npt.NDArray[np.float64], tokens: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """`z` with all others forbidden."""
    masked = np.full(len(z), -np.inf)
    masked[list(tokens)] = z[list(tokens)]
    return masked


def adjusted(z: npt.NDArray[np.float64], row: Row) -> npt.NDArray[np.float64]:
    """Bias, penalties and masks but the grammar's, a token at a time."""
    for token, bias in row.logit_bias:
        z[token] += bias
    tokens = row.prompt + row.output
    for token in set(tokens):
        z[token] = z[token] / row.repetition_penalty if z[token] > 0 else z[token] * row.repetition_penalty
    for token, count in Counter(row.output).items():
        z[token] -= row.frequency_penalty * count + row.presence_penalty
    if row.allowed_token_ids:
        z = only(z, row.allowed_token_ids)
    if len(row.output) < row.min_tokens:
        z[list(row.stop_token_ids)] = -np.inf
    for *start, last in row.bad_words:
        if tokens[len(tokens) - len(start) :] == tuple(start):
            z[last] = -np.inf
    return z


def draw(logits: npt.NDArray[np.float32], row: Row) -> tuple[int, float]:
    """The token, and by how much it won.

    The margin is the winner's lead over every token that rounding could let through top-k, top-p and
    min-p; it is 0 where rounding could cut the winner itself.
    """
    z = adjusted(logits.astype(np.float64), row)
    if row.allowed is not None:
        z = only(z, row.allowed)
    if not (z > -np.inf).any():
        return 0, np.inf
    if row.temperature == 0:
        every = z > -np.inf
        return _winner(z, every, every, every)
    z = z / row.temperature
    order = np.lexsort((np.arange(len(z)), -z))  # falling, ties by rising ID
    order = order[z[order] > -np.inf]
    fewest, kept, most = _counts(z[order], row)
    nominal, sure, possible = (_members(len(z), order[:count]) for count in (kept, fewest, most))
    last = z[order[kept - 1]]
    near = np.abs(z - last) <= ROUNDING * max(1.0, abs(last))
    if kept < len(order) and len(set(z[near])) > 1:  # equal scores are cut by ID, which cannot be rounded
        sure &= ~near
        possible |= near
    if row.min_p > 0:
        above_bound = z - (z[order[0]] + np.log(row.min_p))
        nominal &= above_bound >= 0
        sure &= (above_bound > ROUNDING) | (z == z[order[0]])
        possible &= above_bound > -ROUNDING
    noisy = np.full(len(z), -np.inf)
    tokens = np.flatnonzero(possible | nominal)
    noisy[tokens] = z[tokens] + gumbel(tokens, row)
    return _winner(noisy, nominal, sure, possible)


ROUNDING = 1e-5  # float32's, of scores of some units


def _counts(z: npt.NDArray[np.float64], row: Row) -> tuple[int, int, int]:
    """How many of the scores `z` (falling) top-k and top-p keep: at least, by the definition, at most."""
    limit = min(row.top_k or len(z), len(z))
    if row.top_p >= 1:
        return limit, limit, limit
    p = np.exp(z[:limit] - z[0])
    running = np.cumsum(p) / p.sum()
    slack = 1e-6  # of float32's sum
    bounds = (row.top_p - slack, np.float32(row.top_p), row.top_p + slack)
    fewest, kept, most = (min(int(np.sum(running < bound)) + 1, limit) for bound in bounds)
    return fewest, kept, most


def _members(vocab: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    inside = np.zeros(vocab, np.bool_)
    inside[tokens] = True
    return inside


def _winner(
    scores: npt.NDArray[np.float64],
    nominal: npt.NDArray[np.bool_],
    sure: npt.NDArray[np.bool_],
    possible: npt.NDArray[np.bool_],
) -> tuple[int, float]:
    """The best nominal token, the lowest ID on an exact tie, and its margin."""
    token = int(np.argmax(np.where(nominal, scores, -np.inf)))
    if not sure[token]:
        return token, 0.0
    rivals = scores[(possible | nominal) & (scores != scores[token])]
    return token, float(scores[token] - rivals.max()) if len(rivals) else np.inf
