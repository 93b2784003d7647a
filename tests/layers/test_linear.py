"""Linear layers: the parts side by side, and where a bias goes."""

from __future__ import annotations

import pytest
import torch

from servelite.kernels.dispatch import REFERENCE
from servelite.layers.build import Build
from servelite.layers.linear import ColumnParallelLinear, RowParallelLinear

BUILD = Build(REFERENCE)


@pytest.mark.parametrize("bias", [False, True])
def test_the_parts_are_loaded_under_their_names_and_stand_side_by_side(bias: bool) -> None:
    layer = ColumnParallelLinear(4, {"q": 3, "k": 2}, BUILD, bias=bias)
    slots = {slot.name: slot.tensor for slot in layer.weights("p")}
    assert set(slots) == {"p.q.weight", "p.k.weight"} | ({"p.q.bias", "p.k.bias"} if bias else set())
    for tensor in slots.values():
        tensor.copy_(torch.randn(tensor.shape))
    x = torch.randn(5, 4)
    q, k = (x @ slots[f"p.{n}.weight"].T + (slots[f"p.{n}.bias"] if bias else 0) for n in "qk")
    torch.testing.assert_close(layer(x), torch.cat((q, k), dim=1))


@pytest.mark.parametrize("bias", [False, True])
def test_a_row_parallel_layer_adds_its_bias_once(bias: bool) -> None:
    layer = RowParallelLinear(4, 3, BUILD, bias=bias)
    slots = {slot.name: slot.tensor for slot in layer.weights("p")}
    assert set(slots) == {"p.weight"} | ({"p.bias"} if bias else set())
    for tensor in slots.values():
        tensor.copy_(torch.randn(tensor.shape))
    x = torch.randn(5, 4)
    expected = x @ slots["p.weight"].T + (slots["p.bias"] if bias else 0)
    torch.testing.assert_close(layer(x), expected)
