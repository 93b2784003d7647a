"""Linear layers: the parts side by side, and where a bias goes."""

from __future__ import annotations

import pytest
import torch

from servelite.kernels.collective import Collective
from servelite.kernels.dispatch import REFERENCE
from servelite.layers.build import Build
from servelite.layers.linear import ColumnParallelLinear, RowParallelLinear
from servelite.layers.partition import all_of, equal_share
from tests.rank_threads import run_ranks

BUILD = Build(REFERENCE)


@pytest.mark.parametrize("bias", [False, True])
def test_the_parts_are_loaded_under_their_names_and_stand_side_by_side(bias: bool) -> None:
    layer = ColumnParallelLinear(4, {"q": all_of(3), "k": all_of(2)}, BUILD, bias=bias)
    slots = {slot.name: slot.tensor for slot in layer.weights("p")}
    assert set(slots) == {"p.q.weight", "p.k.weight"} | ({"p.q.bias", "p.k.bias"} if bias else set())
    for tensor in slots.values():
        tensor.copy_(torch.randn(tensor.shape))
    x = torch.randn(5, 4)
    q, k = (x @ slots[f"p.{n}.weight"].T + (slots[f"p.{n}.bias"] if bias else 0) for n in "qk")
    torch.testing.assert_close(layer(x), torch.cat((q, k), dim=1))


@pytest.mark.parametrize("bias", [False, True])
def test_a_row_parallel_layer_adds_its_bias_once(bias: bool) -> None:
    layer = RowParallelLinear(all_of(4), 3, BUILD, bias=bias)
    slots = {slot.name: slot.tensor for slot in layer.weights("p")}
    assert set(slots) == {"p.weight"} | ({"p.bias"} if bias else set())
    for tensor in slots.values():
        tensor.copy_(torch.randn(tensor.shape))
    x = torch.randn(5, 4)
    expected = x @ slots["p.weight"].T + (slots["p.bias"] if bias else 0)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_ranks_compute_what_one_does(ranks: int, bias: bool) -> None:
    """Each part of the fused one is split by itself, and the bias of the sum is added once."""
    inner = {"q": 8, "k": 4}
    whole = {f"{name}.weight": torch.randn(size, 4) for name, size in inner.items()}
    whole |= {f"{name}.bias": torch.randn(size) for name, size in inner.items()}
    whole |= {"o.weight": torch.randn(3, 12), "o.bias": torch.randn(3)}
    x = torch.randn(5, 4)
    q, k = (x @ whole[f"{n}.weight"].T + (whole[f"{n}.bias"] if bias else 0) for n in "qk")
    out = torch.cat((q, k), dim=1) @ whole["o.weight"].T + (whole["o.bias"] if bias else 0)

    def run(group: Collective) -> tuple[torch.Tensor, torch.Tensor]:
        build = Build(REFERENCE, group=group)
        shares = {name: equal_share(size, group.rank, group.size) for name, size in inner.items()}
        column = ColumnParallelLinear(4, shares, build, bias=bias)
        row = RowParallelLinear(equal_share(12, group.rank, group.size), 3, build, bias=bias)
        for slot in (*column.weights("p"), *row.weights("p.o")):
            value = whole[slot.name.removeprefix("p.")]
            assert slot.whole_shape == value.shape
            slot.tensor.copy_(value.narrow(slot.dim, slot.start, slot.tensor.shape[slot.dim]))
        features = column(x)
        own = torch.cat((q, k), dim=1).chunk(ranks, dim=1)[group.rank].contiguous()
        return features, row(own)

    results = run_ranks(ranks, run)
    split = [features.split([8 // ranks, 4 // ranks], dim=1) for features, _ in results]
    torch.testing.assert_close(torch.cat([part[0] for part in split], dim=1), q)
    torch.testing.assert_close(torch.cat([part[1] for part in split], dim=1), k)
    for _, sum_of_all in results:
        torch.testing.assert_close(sum_of_all, out)
        assert torch.equal(sum_of_all, results[0][1])
