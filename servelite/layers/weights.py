"""How layers say what they are loaded from. They know Hugging Face's names only, and no file format."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from servelite.layers.partition import Share


@dataclass(frozen=True)
class WeightSlot:
    """A checkpoint's tensor, or a rank's part of it, and the place it is to be copied to.

    `tensor` is the layer's own memory, or a slice of it where several tensors are fused into one. The
    loader adds `offset` to what the checkpoint holds.
    """

    name: str
    tensor: Tensor
    offset: float = 0.0
    share: Share | None = None  # of dimension `dim`; None: `tensor` is all of it
    dim: int = 0  # 0 or 1

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        shape = list(self.tensor.shape)
        if self.share is not None:
            shape[self.dim] = self.share.whole
        return tuple(shape)

    @property
    def start(self) -> int:
        """Where in dimension `dim` of the checkpoint's tensor the part begins."""
        return 0 if self.share is None else self.share.start
