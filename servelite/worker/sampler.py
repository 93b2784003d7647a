"""Draws tokens: a pure function of (logits, parameters, seed, choice, output position).

A draw is the arg max of logit/T + g over the tokens that survive top-k, top-p and min-p, with g the
Gumbel noise of `philox.py`: a softmax sample without a sum, a scan or a state. Order of the passes:
bias, penalties and token masks (`logits_processors.py`, before this), grammars' masks, temperature,
top-k, top-p, min-p; a pass that no row needs is skipped. On a tie the lowest token ID wins, everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servelite.ipc.masks import unpack_bits
from servelite.worker.philox import GUMBEL_LARGEST, gumbel_numpy

_FIRST_LOOK = 256  # of a row's best tokens: holds the nucleus nearly always
_LIKELY = 6.0  # below a row's best: tokens whose noise is made first, to bound what the others must reach
_NOISE_CHUNK = 1 << 13  # tokens whose noise is made at once: Philox's intermediates stay in cache


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of the rows to draw for, a column each, all [rows]."""

    temperature: Tensor  # float32; 0: greedy
    top_k: Tensor  # int64; 0: all
    top_p: Tensor  # float32; 1: all
    min_p: Tensor  # float32; 0: all
    seed: Tensor  # int64, the bits of an unsigned seed
    choice: Tensor  # int64
    position: Tensor  # int64, of the token drawn, counted from the end of the prompt

    def select(self, rows: Tensor) -> SamplingRows:
        """The same of `rows` (int64 indices) only."""
        return SamplingRows(*(column[rows] for column in vars(self).values()))


def apply_masks(logits: Tensor, places: Tensor, masks: npt.NDArray[np.uint8]) -> None:
    """Forbid, in some rows, what their masks do not allow; the other rows are not touched.

    Args:
        logits: float32 [rows, vocabulary]; changed in place.
        places: int64 [masked], places among the rows.
        masks: [masked, >= ceil(vocabulary / 8)], bits little-endian, 1 allows.
    """
    allowed = torch.from_numpy(unpack_bits(masks, logits.shape[1]))
    logits[places] = logits[places].masked_fill_(~allowed, -torch.inf)


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Draw one token a row.

    Args:
        logits: float32 [rows, vocabulary]; overwritten.

    Returns:
        int64 [rows], always inside the vocabulary: the arg max where a row's best logit is not finite
        (NaN, or nothing is allowed: then token 0), and no other row suffers from that.
    """
    best, tokens = logits.max(dim=-1)
    random = torch.nonzero(rows.temperature > 0).squeeze(-1)
    if len(random):
        everything = len(random) == len(tokens)
        chosen = rows if everything else rows.select(random)
        scores = logits if everything else logits[random]
        # Less the best before the division: no temperature can make a score overflow.
        scores.sub_(best[random, None]).div_(chosen.temperature[:, None])
        _truncate(scores, chosen)
        tokens[random] = torch.from_numpy(_draw(scores.numpy(), chosen, tokens[random].numpy()))
    return tokens


def _truncate(scores: Tensor, rows: SamplingRows) -> None:
    """Set what top-k, top-p and min-p cut to -inf. `scores`: each row's best is 0."""
    limited = torch.nonzero((rows.top_k > 0) | (rows.top_p < 1)).squeeze(-1)
    if len(limited):
        everything = len(limited) == len(scores)
        part = scores if everything else scores[limited]
        _keep_best(part, *_kept(part, rows.top_k[limited], rows.top_p[limited]))
        if not everything:
            scores[limited] = part
    if bool((rows.min_p > 0).any()):
        # p >= min_p * max(p), and the best score is 0.
        scores.masked_fill_(scores < rows.min_p.log()[:, None], -torch.inf)


def _kept(scores: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens each row keeps, in order of falling score, and the last kept one's score.

    Top-p keeps the fewest tokens whose probability, among what top-k kept, reaches it. Both depend on
    the sorted scores only, so ties need no care here; only the best few are sorted, then more for the
    rows whose nucleus is wider.
    """
    rows, vocab = scores.shape
    limit = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    mass = scores.exp().sum(dim=-1, dtype=torch.float64)  # each row's best score is 0
    kept, last = torch.empty_like(limit), torch.empty(rows)
    pending = torch.arange(rows)
    size = min(vocab, max(_FIRST_LOOK, int(top_k.max())))
    while len(pending):
        best = (scores if len(pending) == rows else scores[pending]).topk(size, dim=-1).values
        of_limit, of_top_p = limit[pending], top_p[pending]
        running = (best.double().exp() * (torch.arange(size) < of_limit[:, None])).cumsum(dim=-1)
        total = torch.where(of_limit <= size, running[:, -1], mass[pending])
        reached = running >= of_top_p[:, None] * total[:, None]
        # Without top-p a row keeps its top-k, which the first look holds whole. A row that is not
        # finite reaches nothing: the last look, of all tokens, settles every row.
        count = torch.where(of_top_p < 1, reached.int().argmax(dim=-1) + 1, of_limit)
        settled = (of_top_p >= 1) | reached[:, -1] | (size == vocab)
        kept[pending[settled]] = count[settled]
        last[pending[settled]] = best[settled, count[settled] - 1]
        pending, size = pending[~settled], min(vocab, size * 16)
    return kept, last


def _keep_best(scores: Tensor, kept: Tensor, last: Tensor) -> None:
    """Set all but each row's `kept` best to -inf; of those that tie with `last`, the lowest IDs stay."""
    scores.masked_fill_(scores < last[:, None], -torch.inf)
    surplus = (scores >= last[:, None]).sum(dim=-1) - kept
    for row in torch.nonzero(surplus > 0).flatten().tolist():
        ties = torch.nonzero(scores[row] == last[row]).squeeze(-1)
        scores[row, ties[len(ties) - int(surplus[row]) :]] = -torch.inf


def _draw(
    scores: npt.NDArray[np.float32], rows: SamplingRows, tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The token of the largest score + noise in each row; that of `tokens` where a row is not finite.

    Noise is dear and bounded: a token so far below the likely ones' winner that no noise can lift it
    above gets none, which changes nothing.
    """
    best, winner = _best_noisy(scores, scores >= -_LIKELY, rows)
    reach = best[:, None] - np.float32(GUMBEL_LARGEST)
    other_best, other = _best_noisy(scores, (scores < -_LIKELY) & (scores >= reach), rows)
    winner = np.where((other_best > best) | ((other_best == best) & (other < winner)), other, winner)
    return np.where(np.isfinite(best), winner, tokens)


def _best_noisy(
    scores: npt.NDArray[np.float32], candidates: npt.NDArray[np.bool_], rows: SamplingRows
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Each row's largest score + noise among its candidates and that token; -inf and 0 without any."""
    where = np.flatnonzero(candidates)
    row, token = np.divmod(where, scores.shape[1])
    noisy = scores.reshape(-1)[where]
    position, choice, seed = rows.position.numpy(), rows.choice.numpy(), rows.seed.numpy()
    for begin in range(0, len(where), _NOISE_CHUNK):
        part = slice(begin, begin + _NOISE_CHUNK)
        of = row[part]
        noisy[part] += gumbel_numpy(token[part], position[of], choice[of], seed[of])
    best = np.full(len(scores), -np.inf, np.float32)
    winner = np.zeros(len(scores), np.int64)
    first = np.flatnonzero(np.diff(row, prepend=-1))  # where each row that has candidates begins
    best[row[first]] = np.maximum.reduceat(noisy, first) if len(first) else -np.inf
    winning = np.flatnonzero(noisy == best[row])[::-1]
    winner[row[winning]] = token[winning]  # backwards, so that the lowest of tying tokens is written last
    return best, winner
