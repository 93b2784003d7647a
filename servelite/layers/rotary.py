"""Rotary position embedding (arXiv 2104.09864), with the scalings that stretch it to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class UnknownScaling(ValueError):
    """A rope scaling that is not supported; the text names it."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of a step's positions, shared by all layers; both [tokens, 1, head_dim].

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
            UnknownScaling: neither default, linear nor llama3, or without a number that it needs.
        """
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        try:
            self._frequencies = _scaled(frequencies, scaling or {}).to(torch.float32)
        except (KeyError, TypeError) as error:
            raise UnknownScaling(f"rope_scaling {scaling} cannot be used ({error!r})") from None

    def __call__(self, positions: Tensor) -> Rotation:
        """positions: int64 [tokens]."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return Rotation(
            cos=torch.cat((cos, cos), dim=-1).unsqueeze(1), sin=torch.cat((-sin, sin), dim=-1).unsqueeze(1)
        )


def _scaled(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise UnknownScaling(f"rope_scaling of type {kind!r} is not supported (default, linear, llama3 are)")


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1's: low frequencies are divided by the factor, high ones kept, those between blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling["factor"])
