"""Qwen3, the dense models (arXiv 2505.09388).

Llama's layer with a norm over each head's query and key; a window, where it is used at all, in some layers:

x = embed(ids)
each layer:  x += o_proj(attention(rope(norm(q)), rope(norm(k)), v, window));  q, k, v = qkv_proj(norm(x))
             x += down(silu(gate(norm(x))) * up(norm(x)))
logits = head(norm(x))
"""

from __future__ import annotations

from typing import Any

from servelite.layers.attention import QueryKeyNorm, SelfAttention
from servelite.layers.build import Build
from servelite.layers.mlp import GatedMLP
from servelite.layers.rotary import RotaryEmbedding
from servelite.models.config_fields import ConfigFields
from servelite.models.decoder import Decoder, DecoderShape, PreNormLayer


class Qwen3ForCausalLM(Decoder):
    """The whole model."""

    def __init__(self, config: dict[str, Any], build: Build) -> None:
        """See `registry.build_model`."""
        fields = ConfigFields(config, "Qwen3ForCausalLM")
        fields.choice("hidden_act", "silu", "silu")
        shape = DecoderShape.read(fields)
        intermediate_size, bias = fields.size("intermediate_size"), fields.flag("attention_bias")
        shape.check_ranks(build, intermediate_size=intermediate_size)
        heads, rotary = shape.attention(), RotaryEmbedding(shape.head_dim, *fields.rope())

        def layer(number: int, group: int) -> PreNormLayer:
            norm = QueryKeyNorm(shape.head_dim, shape.eps, build)
            attention = SelfAttention(heads, number, group, build, qkv_bias=bias, out_bias=bias, norm=norm)
            mlp = GatedMLP(shape.hidden_size, intermediate_size, build)
            return PreNormLayer(shape, attention, mlp, build)

        windows = fields.upper_windows(shape.num_layers)
        super().__init__(shape, layer, windows, [rotary] * shape.num_layers, build)
