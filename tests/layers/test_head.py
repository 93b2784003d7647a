"""The vocabulary head: the arg max's ties, and the flag of rows that are not finite."""

from __future__ import annotations

import pytest
import torch

from servelite.layers.embedding import HeadNeed, VocabEmbedding, VocabHead


def head_of(weight: torch.Tensor) -> VocabHead:
    embedding = VocabEmbedding(*weight.shape)
    embedding.weight.copy_(weight)
    return VocabHead(embedding)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_lowest_of_tying_tokens_is_the_best(rows: int) -> None:
    weight = torch.zeros(49152, 4)
    weight[[40001, 17, 33000]] = 1
    out = head_of(weight)(torch.ones(rows, 4), HeadNeed.ARG_MAX)
    assert out.best is not None
    assert out.best.tolist() == [17] * rows
    assert out.logits is None
    assert out.finite.all()


@pytest.mark.parametrize("need", list(HeadNeed))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_any_logit_that_is_not_finite_is_flagged(bad: float, need: HeadNeed) -> None:
    weight = torch.eye(300, 4)
    hidden = torch.ones(3, 4)
    hidden[1, 2] = bad
    assert head_of(weight)(hidden, need).finite.tolist() == [True, False, True]


def test_logits_are_products_with_the_embeddings() -> None:
    weight, hidden = torch.randn(50, 8), torch.randn(5, 8)
    out = head_of(weight)(hidden, HeadNeed.LOGITS)
    assert out.logits is not None
    torch.testing.assert_close(out.logits, hidden @ weight.T)
    assert out.best is None
