"""Mixtral (arXiv 2401.04088).

Mistral's layer with a mixture of experts for the feed-forward part:

x = embed(ids)
each layer:  x += o_proj(attention(rope(q), rope(k), v, window));  q, k, v = qkv_proj(norm(x))
             x += sum over the 2 likeliest experts e of p_e * w2_e(silu(w1_e(norm(x))) * w3_e(norm(x)))
logits = head(norm(x))

p = softmax(gate(norm(x))), of the chosen experts alone: their p add up to 1.
"""

from __future__ import annotations

from typing import Any

from servelite.layers.attention import SelfAttention
from servelite.layers.build import Build
from servelite.layers.moe import ExpertNames, SparseMoE
from servelite.layers.rotary import RotaryEmbedding
from servelite.models.config_fields import ConfigFields
from servelite.models.decoder import Decoder, DecoderShape, PreNormLayer

_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


class MixtralForCausalLM(Decoder):
    """The whole model."""

    def __init__(self, config: dict[str, Any], build: Build) -> None:
        """See `registry.build_model`."""
        fields = ConfigFields(config, "MixtralForCausalLM")
        fields.choice("hidden_act", "silu", "silu")
        fields.refuse("attention_bias", None, False)
        shape = DecoderShape.read(fields)
        intermediate_size = fields.size("intermediate_size")
        experts, top_k = fields.experts("num_local_experts", 8, 2)
        shape.check_ranks(build, intermediate_size=intermediate_size)
        rotary = RotaryEmbedding(shape.head_dim, *fields.rope(theta=1e6))

        def layer(number: int, group: int) -> PreNormLayer:
            attention = SelfAttention(shape.attention(), number, group, build)
            moe = SparseMoE(
                shape.hidden_size, intermediate_size, experts, top_k, _NAMES, build, renormalise=True
            )
            return PreNormLayer(shape, attention, moe, build)

        windows = fields.one_window(shape.num_layers, default=None)
        super().__init__(shape, layer, windows, [rotary] * shape.num_layers, build)
