"""The mixture of experts: a token's result is its own, and every expert it is sent to counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from servelite.kernels.collective import ONE_RANK, Collective
from servelite.kernels.dispatch import REFERENCE
from servelite.layers.build import Build
from servelite.layers.moe import ExpertNames, SparseMoE
from tests.rank_threads import run_ranks

HIDDEN, INNER, EXPERTS = 12, 20, 6


def make(top_k: int, *, renormalise: bool = True, group: Collective = ONE_RANK) -> SparseMoE:
    names = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
    build = Build(REFERENCE, group=group)
    moe = SparseMoE(HIDDEN, INNER, EXPERTS, top_k, names, build, renormalise=renormalise)
    generator = torch.Generator().manual_seed(top_k)
    for slot in moe.weights("model.layers.0"):
        whole = torch.randn(slot.whole_shape, generator=generator)
        slot.tensor.copy_(whole.narrow(slot.dim, slot.start, slot.tensor.shape[slot.dim]))
    return moe


def one_by_one(moe: SparseMoE, x: torch.Tensor, top_k: int, renormalise: bool) -> torch.Tensor:
    """By the formula, token after token, in float64."""
    weights = {
        slot.name.removeprefix("model.layers.0.mlp."): slot.tensor for slot in moe.weights("model.layers.0")
    }
    rows = []
    for token in x.double():
        p = (weights["gate.weight"].double() @ token).softmax(0)
        chosen = p.argsort(descending=True)[:top_k].tolist()
        total = sum(p[e] for e in chosen) if renormalise else 1
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for e in chosen:
            gate, up, down = (
                weights[f"experts.{e}.{n}_proj.weight"].double() for n in ("gate", "up", "down")
            )
            row += p[e] / total * (down @ (F.silu(gate @ token) * (up @ token)))
        rows.append(row)
    return torch.stack(rows).float()


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_it_is_the_sum_over_the_likeliest_experts(tokens: int, top_k: int, renormalise: bool) -> None:
    moe = make(top_k, renormalise=renormalise)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(moe(x), one_by_one(moe, x, top_k, renormalise), atol=2e-4, rtol=1e-5)


def test_a_token_is_not_touched_by_the_others() -> None:
    """All going to one expert (no capacity), and one whose state is not finite."""
    moe = make(2)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([moe(row[None]) for row in x])
    crowded = x.repeat(8, 1)
    torch.testing.assert_close(moe(crowded), alone.repeat(8, 1), atol=1e-4, rtol=1e-5)
    x[7] = torch.nan
    out = moe(x)
    assert out[7].isnan().all()
    others = torch.arange(40) != 7
    torch.testing.assert_close(out[others], alone[others], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("top_k", [1, 2])
def test_ranks_with_a_part_of_each_expert_compute_what_one_does(ranks: int, top_k: int) -> None:
    x = torch.randn(33, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = make(top_k)(x)
    first, *others = run_ranks(ranks, lambda group: make(top_k, group=group)(x))
    torch.testing.assert_close(first, expected, atol=2e-4, rtol=1e-5)
    assert all(torch.equal(first, other) for other in others)
