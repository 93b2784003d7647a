"""Qwen3, the mixture-of-experts models (arXiv 2505.09388).

Qwen3's layer; in the layers that are sparse, experts take the place of the feed-forward part:

x = embed(ids)
each layer:  x += o_proj(attention(rope(norm(q)), rope(norm(k)), v, window));  q, k, v = qkv_proj(norm(x))
             x += sum over the k likeliest experts e of p_e * down_e(silu(gate_e(norm(x))) * up_e(norm(x)))
logits = head(norm(x))

p = softmax(gate(norm(x))); with `norm_topk_prob` of the chosen experts alone: their p add up to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from servelite.layers.attention import QueryKeyNorm, SelfAttention
from servelite.layers.build import Build
from servelite.layers.mlp import GatedMLP
from servelite.layers.moe import ExpertNames, SparseMoE
from servelite.layers.rotary import RotaryEmbedding
from servelite.models.config_fields import ConfigFields
from servelite.models.decoder import Decoder, DecoderShape, FeedForward, PreNormLayer

_NAMES = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")


class Qwen3MoeForCausalLM(Decoder):
    """The whole model."""

    def __init__(self, config: dict[str, Any], build: Build) -> None:
        """See `registry.build_model`."""
        fields = ConfigFields(config, "Qwen3MoeForCausalLM")
        fields.choice("hidden_act", "silu", "silu")
        shape = DecoderShape.read(fields)
        bias = fields.flag("attention_bias")
        feed_forward = _feed_forwards(fields, shape, build)
        heads, rotary = shape.attention(), RotaryEmbedding(shape.head_dim, *fields.rope())

        def layer(number: int, group: int) -> PreNormLayer:
            norm = QueryKeyNorm(shape.head_dim, shape.eps, build)
            attention = SelfAttention(heads, number, group, build, qkv_bias=bias, out_bias=bias, norm=norm)
            return PreNormLayer(shape, attention, feed_forward(number), build)

        used = fields.flag("use_sliding_window")
        windows = fields.one_window(shape.num_layers) if used else (0,) * shape.num_layers
        super().__init__(shape, layer, windows, [rotary] * shape.num_layers, build)


def _feed_forwards(fields: ConfigFields, shape: DecoderShape, build: Build) -> Callable[[int], FeedForward]:
    """From a layer's number to its feed-forward part: every `decoder_sparse_step`th layer is sparse, but
    for those that `mlp_only_layers` lists."""
    dense_size, sparse_size = fields.size("intermediate_size"), fields.size("moe_intermediate_size")
    # transformers 5 writes Mixtral's name of the field.
    field = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    experts, top_k = fields.experts(field, 128, 8)
    renormalise = fields.flag("norm_topk_prob")
    step, dense = fields.size("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise fields.error("mlp_only_layers", "not a list of layers")

    def is_dense(layer: int) -> bool:
        return layer in dense or bool((layer + 1) % step)

    used = {is_dense(layer) for layer in range(shape.num_layers)}
    sizes = {True: ("intermediate_size", dense_size), False: ("moe_intermediate_size", sparse_size)}
    shape.check_ranks(build, **dict(sizes[kind] for kind in used))

    def make(layer: int) -> FeedForward:
        if is_dense(layer):
            return GatedMLP(shape.hidden_size, dense_size, build)
        return SparseMoE(
            shape.hidden_size, sparse_size, experts, top_k, _NAMES, build, renormalise=renormalise
        )

    return make
