"""The rule by which token sequences are compared, wherever they are.

Two answers to one request must be equal token for token. The first difference may stand where the
two candidates' scores (greedy: logits; seeded: logit/T + g) are within 1e-4 of each other: rounding
decides there, and nothing is compared after it. Such ties are counted, and more than
max(1, n / 2000) of them in n tokens compared is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from servelite.models.base import CausalModel
from servelite.worker.philox import gumbel_numpy
from tests.paged_forward import paged_logits

TIE_MARGIN = 1e-4
TOKENS_A_TIE = 2000

Scorer = Callable[[Sequence[int]], npt.NDArray[np.float32]]
"""From a sequence's token IDs to the float32 logits [vocab] of the token that follows."""


class Draw(NamedTuple):
    """What a token's score depends on beside its logit; greedy by default."""

    temperature: float = 0.0
    seed: int = 0
    choice: int = 0


class Pair(NamedTuple):
    """Two answers to one request."""

    name: str
    prompt_ids: Sequence[int]
    expected: Sequence[int]
    got: Sequence[int]
    draw: Draw = Draw()


@dataclass(frozen=True)
class TieReport:
    """What was compared."""

    tokens: int  # compared, up to each answer's first difference
    ties: tuple[str, ...]  # one line each


def compare_tokens(pairs: Iterable[Pair], scorer: Scorer) -> TieReport:
    """Fail (AssertionError) unless each pair is equal but for ties, and the ties are few."""
    tokens, ties = 0, []
    for pair in pairs:
        first = next(
            (i for i, (a, b) in enumerate(zip(pair.expected, pair.got, strict=False)) if a != b), None
        )
        if first is None:
            assert len(pair.expected) == len(pair.got), (
                f"{pair.name}: {len(pair.got)} tokens, expected {len(pair.expected)}, the shorter is a prefix"
            )
            tokens += len(pair.expected)
            continue
        tokens += first + 1
        a, b = pair.expected[first], pair.got[first]
        gap = abs(_score(pair, scorer, first, a) - _score(pair, scorer, first, b))
        line = f"{pair.name}: token {first} is {b}, expected {a}, their scores {gap:.2e} apart"
        assert gap <= TIE_MARGIN, line
        ties.append(line)
    limit = max(1, tokens // TOKENS_A_TIE)
    assert len(ties) <= limit, f"{len(ties)} ties in {tokens} tokens, more than {limit}: {ties}"
    return TieReport(tokens, tuple(ties))


def _score(pair: Pair, scorer: Scorer, index: int, token: int) -> float:
    logit = float(scorer([*pair.prompt_ids, *pair.expected[:index]])[token])
    if pair.draw.temperature == 0:
        return logit
    noise = gumbel_numpy(token, index, pair.draw.choice, pair.draw.seed)
    return logit / pair.draw.temperature + float(noise[0])


def model_scorer(model: CausalModel) -> Scorer:
    """Scores by our own model, the whole sequence in one piece."""
    return lambda ids: paged_logits(model, ids)[-1].numpy()
