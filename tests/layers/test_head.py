"""The vocabulary head: the arg max's ties, and the flag of rows that are not finite."""

from __future__ import annotations

import pytest
import torch

from servelite.kernels.collective import ONE_RANK, Collective
from servelite.kernels.dispatch import REFERENCE
from servelite.layers.build import Build
from servelite.layers.embedding import HeadNeed, HeadOutput, VocabEmbedding, VocabHead
from tests.rank_threads import run_ranks


def embedding_of(weight: torch.Tensor, group: Collective = ONE_RANK) -> VocabEmbedding:
    """A table of which each rank has its rows."""
    embedding = VocabEmbedding(*weight.shape, Build(REFERENCE, weight.dtype, group))
    (slot,) = embedding.weights("t")
    assert slot.whole_shape == weight.shape and slot.dim == 0
    slot.tensor.copy_(weight[slot.start : slot.start + len(slot.tensor)])
    return embedding


def head_of(weight: torch.Tensor, group: Collective = ONE_RANK) -> VocabHead:
    return VocabHead(embedding_of(weight, group))


def on_ranks(ranks: int, weight: torch.Tensor, hidden: torch.Tensor, need: HeadNeed) -> HeadOutput:
    """What every one of the ranks says, which must be the same."""
    first, *others = run_ranks(ranks, lambda group: head_of(weight, group)(hidden, need))
    for other in others:
        for name, value in vars(first).items():
            assert value is None or torch.equal(value.isnan(), getattr(other, name).isnan())
            assert value is None or torch.equal(value.nan_to_num(), getattr(other, name).nan_to_num())
    return first


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


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_embed_as_one_does(ranks: int, dtype: torch.dtype) -> None:
    weight, ids = torch.randn(257, 8).to(dtype), torch.tensor([0, 256, 17, 128, 129, 64, 65, 256])
    for rows in run_ranks(ranks, lambda group: embedding_of(weight, group)(ids)):
        assert torch.equal(rows, weight[ids])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_score_as_one_does(ranks: int, dtype: torch.dtype) -> None:
    """A vocabulary that no number of ranks divides; integers, so that no sum is rounded."""
    weight, hidden = torch.randint(-9, 9, (257, 8)).to(dtype), torch.randint(-9, 9, (6, 8)).to(dtype)
    alone = head_of(weight)
    logits = on_ranks(ranks, weight, hidden, HeadNeed.LOGITS).logits
    expected = alone(hidden, HeadNeed.LOGITS).logits
    assert logits is not None and expected is not None
    assert torch.equal(logits, expected) and logits.is_contiguous() and logits.dtype == torch.float32
    out = on_ranks(ranks, weight, hidden, HeadNeed.ARG_MAX)
    best = alone(hidden, HeadNeed.ARG_MAX).best
    assert out.best is not None and best is not None
    assert out.best.tolist() == best.tolist() and out.best.dtype == torch.int64
    assert out.finite.all() and out.logits is None


def test_of_tokens_of_several_ranks_that_tie_the_lowest_is_the_best() -> None:
    hidden = torch.ones(2, 4)
    for tying in ([200, 70, 131, 256], [256, 195], [0, 256], [65, 64], [130, 129]):
        weight = torch.full((257, 4), -1.0)  # the best is below zero, too
        weight[tying] = -0.5
        out = on_ranks(4, weight, hidden, HeadNeed.ARG_MAX)
        assert out.best is not None
        assert out.best.tolist() == [min(tying)] * 2


BIG = 3e38  # its square overflows


@pytest.mark.parametrize("need", list(HeadNeed))
@pytest.mark.parametrize("weights", [(BIG, 0.0), (-BIG, 0.0), (BIG, -BIG)], ids=["inf", "-inf", "nan"])
@pytest.mark.parametrize("token", [3, 100, 256])
def test_a_logit_of_any_rank_that_is_not_finite_flags_its_row(
    weights: tuple[float, float], need: HeadNeed, token: int
) -> None:
    weight, hidden = torch.zeros(257, 2), torch.ones(3, 2)
    weight[token] = torch.tensor(weights)
    hidden[1] = BIG
    assert on_ranks(4, weight, hidden, need).finite.tolist() == [True, False, True]
