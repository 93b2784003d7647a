"""Logprobs of tokens: of the model's own distribution, before bias, penalties, masks and temperature.

A token's logprob is its logit less the row's logsumexp; no [rows, vocabulary] matrix of logprobs is
ever made. A row's scores do not depend on what its neighbours ask for: among equal logits, the lowest
token IDs are the better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servelite.ipc.messages import TOKEN, TokenLogprobs, pack

TILE = 64
"""Rows of [rows, vocabulary] worked on at once, where a prompt's logprobs could ask for thousands."""

_FLOAT = np.dtype("<f4")


@dataclass(frozen=True)
class TokenScores:
    """Logprobs of given tokens, and of each row's k best."""

    chosen: npt.NDArray[np.float32]  # [rows]
    ids: npt.NDArray[np.int64]  # flat, k[i] for row i, best first
    values: npt.NDArray[np.float32]  # their logprobs


def score_tokens(logits: Tensor, tokens: Tensor, k: npt.NDArray[np.int64]) -> TokenScores:
    """
    Args:
        logits: float32 [rows, vocabulary], all finite; left as they are.
        tokens: int64 [rows].
        k: [rows], how many of the best; at most the vocabulary.
    """
    tiles = [
        _score_tile(logits[begin : begin + TILE], tokens[begin : begin + TILE], k[begin : begin + TILE])
        for begin in range(0, len(logits), TILE)
    ]
    return TokenScores(
        *(np.concatenate([getattr(tile, name) for tile in tiles]) for name in ("chosen", "ids", "values"))
    )


def _score_tile(logits: Tensor, tokens: Tensor, k: npt.NDArray[np.int64]) -> TokenScores:
    best = logits.max(dim=-1, keepdim=True).values
    mass = (logits - best).exp_().sum(dim=-1, dtype=torch.float64)
    logsumexp = (best.squeeze(-1).double() + mass.log()).numpy()
    chosen = logits.gather(1, tokens[:, None]).squeeze(-1).numpy() - logsumexp
    largest = int(k.max())
    if largest == 0:
        return TokenScores(chosen.astype(_FLOAT), np.empty(0, np.int64), np.empty(0, _FLOAT))
    last = logits.topk(largest, dim=-1).values.gather(1, torch.from_numpy(k - 1).clamp(min=0)[:, None])
    last[torch.from_numpy(k == 0)] = torch.inf
    row, token = (where.numpy() for where in torch.nonzero(logits >= last, as_tuple=True))
    values = logits.numpy()[row, token]
    order = np.lexsort((token, -values, row))  # the ties of a row's last one: by ID
    begins = np.searchsorted(row, np.arange(len(k)))
    order = order[np.arange(len(row)) - begins[row] < k[row]]
    return TokenScores(
        chosen.astype(_FLOAT), token[order], (values[order] - logsumexp[row[order]]).astype(_FLOAT)
    )


def sampled_logprobs(
    scores: TokenScores, rows: npt.NDArray[np.int32], index: npt.NDArray[np.int64], k: npt.NDArray[np.int64]
) -> Iterator[tuple[int, TokenLogprobs]]:
    """One message a row, whose token of output position index[i] was scored with k[i] alternatives."""
    ends = np.cumsum(k)
    for i, (row, first, count, end) in enumerate(
        zip(rows.tolist(), index.tolist(), k.tolist(), ends.tolist(), strict=True)
    ):
        ids, values = (column[end - count : end] for column in (scores.ids, scores.values))
        yield row, TokenLogprobs(first, count, scores.chosen[i].tobytes(), pack(ids), values.tobytes())


def prompt_logprobs(
    logits_of: Callable[[Tensor], tuple[Tensor, Tensor]], hidden: Tensor, tokens: Tensor, first: int, k: int
) -> TokenLogprobs | None:
    """Logprobs of consecutive prompt tokens, a tile of rows at a time.

    Args:
        logits_of: from hidden states [<= TILE, hidden_size] to logits and whether each row is finite.
        hidden: [tokens, hidden_size], of the positions before the tokens.
        tokens: int64 [tokens].
        first: prompt position of the first.

    Returns:
        None where a logit is not finite.
    """
    chosen, ids, values = b"", b"", b""
    for begin in range(0, len(hidden), TILE):
        logits, finite = logits_of(hidden[begin : begin + TILE])
        if not bool(finite.all()):
            return None
        scores = score_tokens(logits, tokens[begin : begin + TILE], np.full(len(logits), k))
        chosen += scores.chosen.tobytes()
        ids += pack(scores.ids, TOKEN)
        values += scores.values.tobytes()
    return TokenLogprobs(first, k, chosen, ids, values)
