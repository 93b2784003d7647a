"""What every model offers the loader and the runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # the launcher names architectures without loading torch
    import torch
    from torch import Tensor

    from servelite.kernels.kv_layout import KVGroupSpec
    from servelite.layers.embedding import HeadNeed, HeadOutput
    from servelite.layers.step_context import StepContext
    from servelite.layers.weights import WeightSlot


class ConfigError(ValueError):
    """A model's config asks for what its class cannot do; the text names the field and the value."""


class _AnyModel(Protocol):
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype  # of weights, activations and the KV cache
    kv_groups: tuple[KVGroupSpec, ...]  # with the KV heads of this rank
    prefix: str  # of the names of all its tensors but a head's; a checkpoint without a head may lack it

    def weights(self) -> Iterator[WeightSlot]:
        """Every tensor the checkpoint must hold, and where it, or this rank's part of it, goes."""

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that the model has no use for."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [tokens] -> [tokens, hidden_size] of `dtype`."""

    def forward(self, hidden: Tensor, ctx: StepContext) -> Tensor:
        """[tokens, hidden_size] -> the same, after all layers and the last norm; fills the KV cache."""


class EncoderModel(_AnyModel, Protocol):
    """Every token sees all of its text: no KV cache, no chunks, no next token. Its KV group has no layers."""

    task: Literal["embed"]


class CausalModel(_AnyModel, Protocol):
    """A decoder-only language model."""

    task: Literal["generate"]

    def untie_head(self) -> None:
        """Before the weights are read: give the head a table of its own, whatever the config says."""

    def head(self, hidden: Tensor, need: HeadNeed) -> HeadOutput:
        """[rows, hidden_size] of `forward`'s rows whose next token is wanted; the same on every rank."""


Model = CausalModel | EncoderModel
