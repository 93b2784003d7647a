"""What the decoder-only families share: embedding, a stack of layers, a last norm and the head.

A family's file says what its layers are, in which order norms and residuals come, and what its config may
ask for. The stack is the same for all: x = embed(ids); x = layer(x) for each layer; head(norm(x)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from servelite.kernels.kv_layout import KVGroupSpec
from servelite.layers.attention import AttentionShape, SelfAttention
from servelite.layers.build import Build
from servelite.layers.embedding import HeadNeed, HeadOutput, VocabEmbedding, VocabHead
from servelite.layers.norm import RMSNorm
from servelite.layers.partition import check_ranks, kv_head_share
from servelite.layers.rotary import RotaryEmbedding, Rotation
from servelite.layers.step_context import StepContext
from servelite.layers.weights import WeightSlot
from servelite.models.base import ConfigError
from servelite.models.config_fields import ConfigFields
from servelite.models.kv_groups import divide_layers, group_of_layer


@dataclass(frozen=True)
class DecoderShape:
    """Sizes that every family has, before they are divided over ranks."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # of the norms
    tied: bool  # the head's table is the embedding's

    @classmethod
    def read(cls, fields: ConfigFields) -> DecoderShape:
        """
        Raises:
            ConfigError: a field is absent or has an impossible value.
        """
        hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        shape = cls(
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden,
            num_layers=fields.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.size("num_key_value_heads", heads),
            head_dim=fields.size("head_dim", hidden // heads),
            eps=fields.number("rms_norm_eps"),
            tied=fields.flag("tie_word_embeddings"),
        )
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {shape.num_kv_heads}"
            )
        if shape.head_dim % 2:
            raise ConfigError(f"head_dim is {shape.head_dim}: rotary embedding needs an even one")
        return shape

    def check_ranks(self, build: Build, **intermediate_sizes: int) -> None:
        """Refuse a number of ranks that the model cannot be divided by: each family, before its layers.

        Args:
            intermediate_sizes: of its feed-forward parts, by the config's names of them.

        Raises:
            SettingError: the text has the numbers.
        """
        check_ranks(build.group.size, self.num_heads, self.num_kv_heads, self.vocab_size, intermediate_sizes)

    def attention(self, scale: float | None = None) -> AttentionShape:
        """Of a layer; `scale` is 1 / sqrt(head_dim) unless given."""
        scale = self.head_dim**-0.5 if scale is None else scale
        return AttentionShape(self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim, scale)


class FeedForward(Protocol):
    """The part of a layer that looks at each token alone: dense (`GatedMLP`) or of experts (`SparseMoE`)."""

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        """`prefix`: the layer's, "model.layers.N"."""

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden_size] -> the same."""


class DecoderLayer(Protocol):
    """One layer of the stack."""

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        """`prefix`: "model.layers.N"."""

    def __call__(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """[tokens, hidden_size] -> the same."""


class PreNormLayer:
    """Attention and feed-forward, each behind a norm and around a residual: Llama's layer, and most others'.

    x += attention(norm(x));  x += feed_forward(norm(x))
    """

    def __init__(
        self, shape: DecoderShape, attention: SelfAttention, feed_forward: FeedForward, build: Build
    ) -> None:
        self._attention_norm = RMSNorm(shape.hidden_size, shape.eps, build)
        self._attention = attention
        self._feed_forward_norm = RMSNorm(shape.hidden_size, shape.eps, build)
        self._feed_forward = feed_forward

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._attention_norm.weights(f"{prefix}.input_layernorm")
        yield from self._attention.weights(prefix)
        yield from self._feed_forward_norm.weights(f"{prefix}.post_attention_layernorm")
        yield from self._feed_forward.weights(prefix)

    def __call__(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        x = x + self._attention(self._attention_norm(x), rotation, ctx)
        return x + self._feed_forward(self._feed_forward_norm(x))


class Decoder:
    """A `CausalModel`; a family's class hands it the layers."""

    task: Literal["generate"] = "generate"
    prefix = "model."

    def __init__(
        self,
        shape: DecoderShape,
        make_layer: Callable[[int, int], DecoderLayer],
        windows: Sequence[int],
        rotaries: Sequence[RotaryEmbedding],
        build: Build,
        *,
        norm_offset: float = 0.0,
    ) -> None:
        """
        Args:
            make_layer: from a layer's number and its KV group's.
            windows: by layer, the tokens that its attention sees; 0: all.
            rotaries: by layer; those that share one share its computation.
            norm_offset: of the last norm, as `RMSNorm`'s.
        """
        self.vocab_size: int = shape.vocab_size
        self.hidden_size: int = shape.hidden_size
        self.dtype: torch.dtype = build.dtype
        kv_heads = kv_head_share(shape.num_kv_heads, build.group.rank, build.group.size).size
        self.kv_groups: tuple[KVGroupSpec, ...] = divide_layers(windows, kv_heads, shape.head_dim)
        groups = group_of_layer(self.kv_groups)
        self._make_table = partial(VocabEmbedding, shape.vocab_size, shape.hidden_size, build)
        self._embedding = self._make_table()
        self._rotaries = tuple(dict.fromkeys(rotaries))
        self._rotary_of = tuple(self._rotaries.index(rotary) for rotary in rotaries)
        self._layers = [make_layer(layer, groups[layer]) for layer in range(shape.num_layers)]
        self._norm = RMSNorm(shape.hidden_size, shape.eps, build, offset=norm_offset)
        self._head_table = self._embedding
        self._head = VocabHead(self._head_table)
        if not shape.tied:
            self.untie_head()

    @property
    def _tied(self) -> bool:
        return self._head_table is self._embedding

    def untie_head(self) -> None:
        self._head_table = self._make_table()
        self._head = VocabHead(self._head_table)

    def weights(self) -> Iterator[WeightSlot]:
        yield from self._embedding.weights("model.embed_tokens")
        for number, layer in enumerate(self._layers):
            yield from layer.weights(f"model.layers.{number}")
        yield from self._norm.weights("model.norm")
        if not self._tied:
            yield from self._head_table.weights("lm_head")

    def ignores(self, name: str) -> bool:
        """Old checkpoints hold the rotary frequencies, and some a tied head a second time (the loader
        calls `untie_head` where it is another)."""
        return name.endswith("rotary_emb.inv_freq") or (self._tied and name == "lm_head.weight")

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids)

    def forward(self, hidden: Tensor, ctx: StepContext) -> Tensor:
        rotations = [rotary(ctx.positions) for rotary in self._rotaries]
        for layer, which in zip(self._layers, self._rotary_of, strict=True):
            hidden = layer(hidden, rotations[which], ctx)
            ctx.beat()
        return self._norm(hidden)

    def head(self, hidden: Tensor, need: HeadNeed) -> HeadOutput:
        return self._head(hidden, need)
