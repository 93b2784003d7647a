"""How layers say what they are loaded from. They know Hugging Face's names only, and no file format."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class WeightSlot:
    """A checkpoint's tensor and the place it is to be copied to.

    `tensor` is the layer's own memory, or a slice of it where several tensors are fused into one. The
    loader adds `offset` to what the checkpoint holds.
    """

    name: str
    tensor: Tensor
    offset: float = 0.0
