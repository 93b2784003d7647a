"""Layers divided into KV groups: those of one group keep their keys and values in the same blocks."""

from __future__ import annotations

from collections.abc import Sequence

from servelite.kernels.kv_layout import KVGroupSpec

_MOST_PADDING = 10  # one slot in so many may be left empty


def divide_layers(windows: Sequence[int], num_kv_heads: int, head_dim: int) -> tuple[KVGroupSpec, ...]:
    """The KV groups of a model.

    Blocks of all groups have equal bytes, so each group has room for the same number g of layers, and
    layers of unequal windows never share one. A larger g means fewer groups, which cost time in every
    step; a g that does not divide a kind's layers leaves slots of its last group empty, which costs
    memory. The largest g is taken that leaves at most a tenth of any kind's slots empty. Gemma 3 with
    15 window layers and 3 full ones has g = 3 and 1 + 5 groups.

    Args:
        windows: by layer, how many tokens its attention sees; 0: all.

    Returns:
        The groups, those without a window first, then by window; within a kind, in the order of layers.
    """
    kinds = {window: [i for i, its in enumerate(windows) if its == window] for window in sorted(set(windows))}
    counts = [len(layers) for layers in kinds.values()]
    slots = next(g for g in range(max(counts), 0, -1) if all(_few_are_empty(count, g) for count in counts))
    parts = [(w, its[at : at + slots]) for w, its in kinds.items() for at in range(0, len(its), slots)]
    return tuple(
        KVGroupSpec("window" if window else "full", tuple(part), num_kv_heads, head_dim, window, slots)
        for window, part in parts
    )


def _few_are_empty(layers: int, slots: int) -> bool:
    empty = -layers % slots
    return empty * _MOST_PADDING <= layers + empty


def group_of_layer(groups: Sequence[KVGroupSpec]) -> dict[int, int]:
    """By layer, the index of its group."""
    return {layer: at for at, group in enumerate(groups) for layer in group.layers}
