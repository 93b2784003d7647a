"""Gemma 3, text only (arXiv 2503.19786): `Gemma3ForCausalLM` checkpoints.

x = embed(ids) * sqrt(hidden_size)
each layer:  x += norm(o_proj(attention(rope(norm(q)), rope(norm(k)), v, window)))
             x += norm(down(gelu(gate(norm(x))) * up(norm(x))))
logits = head(norm(x))

q, k, v = qkv_proj(norm(x)), of the layer's input.

Five layers with a window, then one without; either kind has a rotary base of its own. A norm's weight is
stored as its distance from 1. Queries are scaled by 1 / sqrt(query_pre_attn_scalar).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from servelite.layers.attention import QueryKeyNorm, SelfAttention
from servelite.layers.build import Build
from servelite.layers.mlp import GatedMLP
from servelite.layers.norm import RMSNorm
from servelite.layers.rotary import RotaryEmbedding, Rotation
from servelite.layers.step_context import StepContext
from servelite.layers.weights import WeightSlot
from servelite.models.config_fields import FULL, SLIDING, ConfigFields
from servelite.models.decoder import Decoder, DecoderShape


class Gemma3Layer:
    """Attention and feed-forward, each between two norms and around a residual."""

    def __init__(self, shape: DecoderShape, attention: SelfAttention, mlp: GatedMLP, build: Build) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(shape.hidden_size, shape.eps, build, offset=1.0)

        self._before_attention, self._after_attention = norm(), norm()
        self._before_mlp, self._after_mlp = norm(), norm()
        self._attention, self._mlp = attention, mlp

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._before_attention.weights(f"{prefix}.input_layernorm")
        yield from self._attention.weights(prefix)
        yield from self._after_attention.weights(f"{prefix}.post_attention_layernorm")
        yield from self._before_mlp.weights(f"{prefix}.pre_feedforward_layernorm")
        yield from self._mlp.weights(prefix)
        yield from self._after_mlp.weights(f"{prefix}.post_feedforward_layernorm")

    def __call__(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        x = x + self._after_attention(self._attention(self._before_attention(x), rotation, ctx))
        return x + self._after_mlp(self._mlp(self._before_mlp(x)))


class Gemma3ForCausalLM(Decoder):
    """The whole model."""

    def __init__(self, config: dict[str, Any], build: Build) -> None:
        """See `registry.build_model`."""
        fields = ConfigFields(config, "Gemma3ForCausalLM")
        activation = fields.choice("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
        shape = DecoderShape.read(fields)
        intermediate_size, bias = fields.size("intermediate_size"), fields.flag("attention_bias")
        shape.check_ranks(build, intermediate_size=intermediate_size)
        heads = shape.attention(scale=fields.number("query_pre_attn_scalar", 256) ** -0.5)

        def layer(number: int, group: int) -> Gemma3Layer:
            norm = QueryKeyNorm(shape.head_dim, shape.eps, build, offset=1.0)
            attention = SelfAttention(heads, number, group, build, qkv_bias=bias, out_bias=bias, norm=norm)
            mlp = GatedMLP(shape.hidden_size, intermediate_size, build, activation=activation)
            return Gemma3Layer(shape, attention, mlp, build)

        windows = _windows(fields, shape.num_layers)
        everywhere, within = _rotaries(fields, shape.head_dim)
        rotaries = [within if window else everywhere for window in windows]
        super().__init__(shape, layer, windows, rotaries, build, norm_offset=1.0)
        # In the model's type, as Gemma was trained: in bfloat16, sqrt(640) is 25.25.
        self._embedding_scale = torch.tensor(shape.hidden_size**0.5, dtype=build.dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids) * self._embedding_scale


def _windows(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """By layer, the tokens it sees (0: all). Older configs say only that every nth layer sees all."""
    period = fields.size("sliding_window_pattern", 6)
    default = [FULL if layer % period == period - 1 else SLIDING for layer in range(layers)]
    return fields.windows_by_type(fields.get("layer_types", default), layers)


def _rotaries(fields: ConfigFields, head_dim: int) -> tuple[RotaryEmbedding, RotaryEmbedding]:
    """Of the layers without a window, and of those with one."""
    everywhere = RotaryEmbedding(head_dim, *fields.rope(FULL, theta=1e6))
    if fields.rope_by_type:
        return everywhere, RotaryEmbedding(head_dim, *fields.rope(SLIDING))
    # In older configs the scaling holds for the former only.
    return everywhere, RotaryEmbedding(head_dim, fields.number("rope_local_base_freq", 10000.0), None)
