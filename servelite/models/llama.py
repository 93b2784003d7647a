"""Llama 2 and 3 (arXiv 2302.13971, 2307.09288, 2407.21783), and models of the same shape (SmolLM2).

x = embed(ids)
each layer:  x += o_proj(attention(rope(q), rope(k), v));  q, k, v = qkv_proj(norm(x))
             x += down(silu(gate(norm(x))) * up(norm(x)))
logits = head(norm(x))
"""

from __future__ import annotations

from typing import Any

from servelite.layers.attention import SelfAttention
from servelite.layers.build import Build
from servelite.layers.mlp import GatedMLP
from servelite.layers.rotary import RotaryEmbedding
from servelite.models.config_fields import FULL, ConfigFields
from servelite.models.decoder import Decoder, DecoderShape, PreNormLayer


class LlamaForCausalLM(Decoder):
    """The whole model."""

    def __init__(self, config: dict[str, Any], build: Build) -> None:
        """See `registry.build_model`."""
        fields = ConfigFields(config, "LlamaForCausalLM")
        fields.choice("hidden_act", "silu", "silu")
        shape = DecoderShape.read(fields)
        intermediate_size = fields.size("intermediate_size")
        bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
        fields.refuse("layer_types", None, [FULL] * shape.num_layers)
        shape.check_ranks(build, intermediate_size=intermediate_size)
        rotary = RotaryEmbedding(shape.head_dim, *fields.rope())

        def layer(number: int, group: int) -> PreNormLayer:
            attention = SelfAttention(shape.attention(), number, group, build, qkv_bias=bias, out_bias=bias)
            mlp = GatedMLP(shape.hidden_size, intermediate_size, build, bias=mlp_bias)
            return PreNormLayer(shape, attention, mlp, build)

        super().__init__(shape, layer, [0] * shape.num_layers, [rotary] * shape.num_layers, build)
