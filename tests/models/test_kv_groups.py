"""How layers are divided into KV groups."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servelite.models.kv_groups import divide_layers, group_of_layer


def gemma(layers: int, window: int = 512) -> list[int]:
    return [window if layer % 6 != 5 else 0 for layer in range(layers)]


@pytest.mark.parametrize(
    ("windows", "slots", "groups"),
    [
        ([0] * 30, 30, {0: 1}),
        ([64] * 32, 32, {64: 1}),
        ([0, 64] * 14, 14, {0: 1, 64: 1}),
        (gemma(18), 3, {0: 1, 512: 5}),  # Gemma 3 270M
        (gemma(26), 4, {0: 1, 512: 6}),  # 1B: 22 window layers, two slots empty
        (gemma(34), 5, {0: 1, 512: 6}),  # 4B
        (gemma(48), 8, {0: 1, 512: 5}),  # 12B
        (gemma(62), 11, {0: 1, 512: 5}),  # 27B
        ([0, *[8] * 17], 1, {0: 1, 8: 17}),
        ([0, 0, 4, 4, 8, 8], 2, {0: 1, 4: 1, 8: 1}),
    ],
)
def test_known_models(windows: list[int], slots: int, groups: dict[int, int]) -> None:
    made = divide_layers(windows, 2, 16)
    assert {group.num_slots for group in made} == {slots}
    assert Counter(group.window for group in made) == groups


@given(st.lists(st.sampled_from([0, 0, 8, 64]), min_size=1, max_size=80))
def test_each_layer_is_in_one_group_of_its_own_window(windows: list[int]) -> None:
    groups = divide_layers(windows, 2, 16)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    of_layer = group_of_layer(groups)
    for layer, window in enumerate(windows):
        assert groups[of_layer[layer]].window == window
        assert groups[of_layer[layer]].kind == ("window" if window else "full")
    assert len({group.block_bytes(16, torch.float32) for group in groups}) == 1
    for window, layers in Counter(windows).items():
        slots = sum(group.num_slots for group in groups if group.window == window)
        assert slots - layers <= slots / 10
    assert [group.window for group in groups] == sorted(group.window for group in groups)
