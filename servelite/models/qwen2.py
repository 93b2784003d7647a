"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115).

Llama's layer with a bias on queries, keys and values; a window, where it is used at all, in some layers:

x = embed(ids)
each layer:  x += o_proj(attention(rope(q), rope(k), v, window));  q, k, v = qkv_proj(norm(x)) + bias
             x += down(silu(gate(norm(x))) * up(norm(x)))
logits = head(norm(x))
"""

from __future__ import annotations

from typing import Any

from servelite.layers.attention import SelfAttention
from servelite.layers.build import Build
from servelite.layers.mlp import GatedMLP
from servelite.layers.rotary import RotaryEmbedding
from servelite.models.config_fields import ConfigFields
from servelite.models.decoder import Decoder, DecoderShape, PreNormLayer


class Qwen2ForCausalLM(Decoder):
    """The whole model."""

    def __init__(self, config: dict[str, Any], build: Build) -> None:
        """See `registry.build_model`."""
        fields = ConfigFields(config, "Qwen2ForCausalLM")
        fields.choice("hidden_act", "silu", "silu")
        shape = DecoderShape.read(fields)
        intermediate_size = fields.size("intermediate_size")
        shape.check_ranks(build, intermediate_size=intermediate_size)
        rotary = RotaryEmbedding(shape.head_dim, *fields.rope())

        def layer(number: int, group: int) -> PreNormLayer:
            attention = SelfAttention(shape.attention(), number, group, build, qkv_bias=True)
            mlp = GatedMLP(shape.hidden_size, intermediate_size, build)
            return PreNormLayer(shape, attention, mlp, build)

        windows = fields.upper_windows(shape.num_layers)
        super().__init__(shape, layer, windows, [rotary] * shape.num_layers, build)
