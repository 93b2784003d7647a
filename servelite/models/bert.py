"""BERT (arXiv 1810.04805), without a head: a vector for each token, which has seen all of its text.

x = norm(word(ids) + position(0, 1, ...) + type(0))
each layer:  x = norm(x + dense(attention(q, k, v)));  q, k, v = query(x), key(x), value(x)
             x = norm(x + dense(gelu(dense(x))))

A text is one segment: its tokens are all of type 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from servelite.kernels.kv_layout import KVGroupSpec
from servelite.layers.build import Build
from servelite.layers.embedding import VocabEmbedding
from servelite.layers.linear import ColumnParallelLinear, RowParallelLinear
from servelite.layers.norm import LayerNorm
from servelite.layers.partition import check_ranks, equal_share
from servelite.layers.step_context import StepContext
from servelite.layers.weights import WeightSlot
from servelite.models.config_fields import ConfigFields


class BertLayer:
    """Attention over the whole text and feed-forward, each with a norm after its residual."""

    def __init__(self, hidden: int, num_heads: int, intermediate: int, eps: float, build: Build) -> None:
        heads = equal_share(num_heads, build.group.rank, build.group.size)
        inner = equal_share(intermediate, build.group.rank, build.group.size)
        self._heads, self._head_dim = heads.size, hidden // num_heads
        self._attend = build.kernels.full_attention
        features = heads.times(self._head_dim)
        parts = dict.fromkeys(("query", "key", "value"), features)
        self._qkv = ColumnParallelLinear(hidden, parts, build, bias=True)
        self._attention_out = RowParallelLinear(features, hidden, build, bias=True)
        self._attention_norm = LayerNorm(hidden, eps)
        self._up = ColumnParallelLinear(hidden, {"dense": inner}, build, bias=True)
        self._down = RowParallelLinear(inner, hidden, build, bias=True)
        self._norm = LayerNorm(hidden, eps)

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        """`prefix`: "bert.encoder.layer.N"."""
        yield from self._qkv.weights(f"{prefix}.attention.self")
        yield from self._attention_out.weights(f"{prefix}.attention.output.dense")
        yield from self._attention_norm.weights(f"{prefix}.attention.output.LayerNorm")
        yield from self._up.weights(f"{prefix}.intermediate")
        yield from self._down.weights(f"{prefix}.output.dense")
        yield from self._norm.weights(f"{prefix}.output.LayerNorm")

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        """[tokens, hidden_size] -> the same."""
        query, key, value = self._qkv(x).view(len(x), 3, self._heads, self._head_dim).unbind(1)
        attended = self._attend(query, key, value, ctx.batches[0], self._head_dim**-0.5)
        x = self._attention_norm(x + self._attention_out(attended.reshape(len(x), -1)))
        return self._norm(x + self._down(F.gelu(self._up(x))))


class BertModel:
    """The whole model, an `EncoderModel`."""

    task: Literal["embed"] = "embed"
    prefix = "bert."
    kv_groups = (KVGroupSpec("none", (), 0, 0),)

    def __init__(self, config: dict[str, Any], build: Build) -> None:
        """See `registry.build_model`."""
        fields = ConfigFields(config, "BertModel")
        fields.choice("hidden_act", "gelu", "gelu")
        fields.choice("position_embedding_type", "absolute", "absolute")
        for field in ("is_decoder", "add_cross_attention"):
            fields.refuse(field, None, False)
        self.vocab_size, self.hidden_size = fields.size("vocab_size", 30522), fields.size("hidden_size", 768)
        self.dtype = build.dtype
        heads, eps = fields.size("num_attention_heads", 12), fields.number("layer_norm_eps", 1e-12)
        inner = fields.size("intermediate_size", 3072)
        if self.hidden_size % heads:
            raise fields.error("num_attention_heads", f"it does not divide hidden_size {self.hidden_size}")
        check_ranks(build.group.size, heads, heads, self.vocab_size, {"intermediate_size": inner})
        self._words = VocabEmbedding(self.vocab_size, self.hidden_size, build)
        lengths = fields.size("max_position_embeddings", 512), fields.size("type_vocab_size", 2)
        self._positions, self._types = (
            torch.empty((length, self.hidden_size), dtype=build.dtype) for length in lengths
        )
        self._norm = LayerNorm(self.hidden_size, eps)
        layers = range(fields.size("num_hidden_layers", 12))
        self._layers = [BertLayer(self.hidden_size, heads, inner, eps, build) for _ in layers]

    def weights(self) -> Iterator[WeightSlot]:
        yield from self._words.weights("bert.embeddings.word_embeddings")
        yield WeightSlot("bert.embeddings.position_embeddings.weight", self._positions)
        yield WeightSlot("bert.embeddings.token_type_embeddings.weight", self._types)
        yield from self._norm.weights("bert.embeddings.LayerNorm")
        for number, layer in enumerate(self._layers):
            yield from layer.weights(f"bert.encoder.layer.{number}")

    def ignores(self, name: str) -> bool:
        """The heads it was trained with, and the numbers 0, 1, ... that old checkpoints hold."""
        return name.startswith(("bert.pooler.", "cls.")) or name == "bert.embeddings.position_ids"

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `Model.embed`: of the words alone."""
        return self._words(token_ids)

    def forward(self, hidden: Tensor, ctx: StepContext) -> Tensor:
        hidden = self._norm(hidden + F.embedding(ctx.positions, self._positions) + self._types[0])
        for layer in self._layers:
            hidden = layer(hidden, ctx)
            ctx.beat()
        return hidden
