"""Rotary position embedding (arXiv 2104.09864), with the scalings that stretch it to longer contexts."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor


class UnknownScaling(ValueError):
    """A rope scaling that is not supported; the text names it."""


def is_positive(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number above 0 that a float can hold."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= sys.float_info.max


@dataclass(frozen=True)
class Rotation:
    """The rotation of a step's positions, shared by all layers; both float32 [tokens, 1, head_dim].

    As `kernels.rope` takes them: `cos` twice over, `sin` with its first half negated.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Positions to rotations."""

    def __init__(self, head_dim: int, theta: float, scaling: dict[str, Any] | None) -> None:
        """
        Args:
            scaling: `rope_scaling` of the model's config; None or type "default": none.

        Raises:
            UnknownScaling: neither default, linear, llama3 nor yarn, or a number that it needs is absent or
                cannot be used.
        """
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        scaled, self._factor = _scaled(frequencies, theta, scaling or {})
        self._frequencies = scaled.to(torch.float32)

    def __call__(self, positions: Tensor) -> Rotation:
        """positions: int64 [tokens]."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1:
            cos, sin = cos.mul_(self._factor), sin.mul_(self._factor)
        return Rotation(
            cos=torch.cat((cos, cos), dim=-1).unsqueeze(1), sin=torch.cat((-sin, sin), dim=-1).unsqueeze(1)
        )


def _scaled(frequencies: Tensor, theta: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """The frequencies, and what rotated queries and keys are multiplied by."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / _positive(scaling, "factor"), 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(frequencies, theta, scaling), _yarn_factor(scaling)
    raise UnknownScaling(
        f"rope_scaling of type {kind!r} is not supported (default, linear, llama3 and yarn are)"
    )


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1's: low frequencies are divided by the factor, high ones kept, those between blended."""
    low, high = _positive(scaling, "low_freq_factor"), _positive(scaling, "high_freq_factor")
    if not low < high:
        raise _unusable(scaling, "high_freq_factor", f"not above low_freq_factor {low}")
    turns = _positive(scaling, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / _positive(scaling, "factor"))


def _yarn(frequencies: Tensor, theta: float, scaling: dict[str, Any]) -> Tensor:
    """YaRN (arXiv 2309.00071): as llama3, but the blend is linear in the dimension, not in the turns."""
    size = len(frequencies)
    original = _positive(scaling, "original_max_position_embeddings")
    if theta == 1:  # every dimension turns alike
        raise UnknownScaling("rope_theta is 1: yarn needs another base")

    def dimension(turns: float) -> float:
        """Where a frequency makes `turns` turns over the original context, as a (fractional) index."""
        return size * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first, last = (
        dimension(_positive(scaling, field) if scaling.get(field) else default)
        for field, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    truncate = scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise _unusable(scaling, "truncate", "neither true nor false")
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * size - 1)
    width = (last - first) or 0.001
    divided = ((torch.arange(size, dtype=torch.float64) - first) / width).clamp(0, 1)
    return frequencies * ((1 - divided) + divided / _positive(scaling, "factor"))


def _yarn_factor(scaling: dict[str, Any]) -> float:
    """By what queries and keys grow, so that the softmax is as sharp over the longer context."""
    if scaling.get("attention_factor") is not None:
        return _positive(scaling, "attention_factor")
    factor = _positive(scaling, "factor")

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return growth(_positive(scaling, "mscale")) / growth(_positive(scaling, "mscale_all_dim"))
    return growth(1)


def _positive(scaling: dict[str, Any], field: str) -> float:
    value = scaling.get(field)
    if not is_positive(value):
        raise _unusable(scaling, field, "not a positive number")
    return float(value)


def _unusable(scaling: dict[str, Any], field: str, why: str) -> UnknownScaling:
    kind = scaling.get("rope_type", scaling.get("type"))
    return UnknownScaling(f"{field} of the {kind} rope_scaling is {scaling.get(field)!r}: {why}")
