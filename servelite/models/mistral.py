"""Mistral 7B (arXiv 2310.06825) and its successors of the same shape (Mistral NeMo, Mistral Small text).

Llama's layer; `sliding_window`, where it is set, holds for the attention of every layer:

x = embed(ids)
each layer:  x += o_proj(attention(rope(q), rope(k), v, window));  q, k, v = qkv_proj(norm(x))
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


class MistralForCausalLM(Decoder):
    """The whole model."""

    def __init__(self, config: dict[str, Any], build: Build) -> None:
        """See `registry.build_model`."""
        fields = ConfigFields(config, "MistralForCausalLM")
        fields.choice("hidden_act", "silu", "silu")
        fields.refuse("attention_bias", None, False)
        shape = DecoderShape.read(fields)
        intermediate_size = fields.size("intermediate_size")
        shape.check_ranks(build, intermediate_size=intermediate_size)
        rotary = RotaryEmbedding(shape.head_dim, *fields.rope())

        def layer(number: int, group: int) -> PreNormLayer:
            attention = SelfAttention(shape.attention(), number, group, build)
            mlp = GatedMLP(shape.hidden_size, intermediate_size, build)
            return PreNormLayer(shape, attention, mlp, build)

        windows = fields.one_window(shape.num_layers)
        super().__init__(shape, layer, windows, [rotary] * shape.num_layers, build)
