"""Llama 2 and 3 (arXiv 2302.13971, 2307.09288, 2407.21783), and models of the same shape (SmolLM2).

x = embed(ids)
each layer:  x += o_proj(attention(qkv(norm(x))))
             x += down(silu(gate(norm(x))) * up(norm(x)))
logits = head(norm(x))

A layer that `layer_types` calls "sliding_attention" sees the last `sliding_window` tokens only; such
layers are a KV group of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from servelite.kernels.dispatch import Kernels
from servelite.kernels.kv_layout import KVGroupSpec
from servelite.layers.attention import PagedAttention
from servelite.layers.embedding import HeadNeed, HeadOutput, VocabEmbedding, VocabHead
from servelite.layers.linear import ColumnParallelLinear, RowParallelLinear
from servelite.layers.mlp import GatedMLP
from servelite.layers.norm import RMSNorm
from servelite.layers.rotary import RotaryEmbedding, Rotation
from servelite.layers.step_context import StepContext
from servelite.layers.weights import WeightSlot
from servelite.models.base import ConfigError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


class LlamaAttention:
    """Grouped-query attention with its projections."""

    def __init__(self, config: dict[str, Any], layer: int, kernels: Kernels) -> None:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads, head_dim = _kv_heads(config), _head_dim(config)
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        self._qkv = ColumnParallelLinear(hidden, parts)
        group = sorted(set(_windows(config))).index(_windows(config)[layer])
        self._attention = PagedAttention(layer, group, heads, kv_heads, head_dim, kernels)
        self._out = RowParallelLinear(heads * head_dim, hidden)

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._qkv.weights(prefix)
        yield from self._out.weights(f"{prefix}.o_proj")

    def __call__(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        return self._out(self._attention(self._qkv(x), rotation, ctx))


class LlamaLayer:
    """One decoder layer: attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: dict[str, Any], layer: int, kernels: Kernels) -> None:
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self._attention_norm = RMSNorm(hidden, eps, kernels)
        self._attention = LlamaAttention(config, layer, kernels)
        self._mlp_norm = RMSNorm(hidden, eps, kernels)
        self._mlp = GatedMLP(hidden, config["intermediate_size"], kernels)

    def weights(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._attention_norm.weights(f"{prefix}.input_layernorm")
        yield from self._attention.weights(f"{prefix}.self_attn")
        yield from self._mlp_norm.weights(f"{prefix}.post_attention_layernorm")
        yield from self._mlp.weights(f"{prefix}.mlp")

    def __call__(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        x = x + self._attention(self._attention_norm(x), rotation, ctx)
        return x + self._mlp(self._mlp_norm(x))


class LlamaForCausalLM:
    """The whole model, in float32."""

    def __init__(self, config: dict[str, Any], kernels: Kernels) -> None:
        """
        Args:
            config: as Hugging Face's config.json names it.

        Raises:
            ConfigError: the config asks for what this class cannot do.
            UnknownScaling: of its `rope_scaling`.
        """
        _check(config)
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        self.vocab_size: int = config["vocab_size"]
        self.kv_groups: tuple[KVGroupSpec, ...] = _kv_groups(config)
        self._tied = bool(config.get("tie_word_embeddings", False))
        self._embedding = VocabEmbedding(self.vocab_size, hidden)
        self._rotary = RotaryEmbedding(_head_dim(config), *_rope(config))
        self._layers = [LlamaLayer(config, layer, kernels) for layer in range(layers)]
        self._norm = RMSNorm(hidden, config["rms_norm_eps"], kernels)
        self._head_table = self._embedding if self._tied else VocabEmbedding(self.vocab_size, hidden)
        self._head = VocabHead(self._head_table)

    def weights(self) -> Iterator[WeightSlot]:
        yield from self._embedding.weights("model.embed_tokens")
        for number, layer in enumerate(self._layers):
            yield from layer.weights(f"model.layers.{number}")
        yield from self._norm.weights("model.norm")
        if not self._tied:
            yield from self._head_table.weights("lm_head")

    def ignores(self, name: str) -> bool:
        """Old checkpoints hold the rotary frequencies, and some a tied head a second time."""
        return name.endswith("rotary_emb.inv_freq") or (self._tied and name == "lm_head.weight")

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids)

    def forward(self, hidden: Tensor, ctx: StepContext) -> Tensor:
        rotation = self._rotary(ctx.positions)
        for layer in self._layers:
            hidden = layer(hidden, rotation, ctx)
        return self._norm(hidden)

    def head(self, hidden: Tensor, need: HeadNeed) -> HeadOutput:
        return self._head(hidden, need)


def _windows(config: dict[str, Any]) -> list[int]:
    """By layer, how many tokens its attention sees; 0: all."""
    types = config.get("layer_types") or [_FULL] * config["num_hidden_layers"]
    return [config["sliding_window"] if kind == _SLIDING else 0 for kind in types]


def _kv_groups(config: dict[str, Any]) -> tuple[KVGroupSpec, ...]:
    """One group a window, the full one first."""
    windows = _windows(config)
    return tuple(
        KVGroupSpec(
            "window" if window else "full",
            tuple(layer for layer, its in enumerate(windows) if its == window),
            _kv_heads(config),
            _head_dim(config),
            window,
        )
        for window in sorted(set(windows))
    )


def _kv_heads(config: dict[str, Any]) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling; newer configs keep both in `rope_parameters`."""
    parameters = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or parameters.get("rope_theta", 10000.0)
    return theta, config.get("rope_scaling") or parameters


def _check(config: dict[str, Any]) -> None:
    for field in _SIZES:
        _check_size(field, config.get(field))
    _check_size("num_key_value_heads", _kv_heads(config))
    _check_size("head_dim", _head_dim(config))
    _check_layer_types(config)
    if not isinstance(config.get("rms_norm_eps"), float):
        raise ConfigError(f"config field rms_norm_eps is {config.get('rms_norm_eps')!r}, not a number")
    for field in ("attention_bias", "mlp_bias"):
        if config.get(field):
            raise ConfigError(f"config field {field} is set: LlamaForCausalLM here has no biases")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"config field hidden_act is {activation!r}: LlamaForCausalLM here does silu only")
    if config["num_attention_heads"] % _kv_heads(config):
        raise ConfigError(
            f"num_attention_heads {config['num_attention_heads']} is no multiple of "
            f"num_key_value_heads {_kv_heads(config)}"
        )


def _check_layer_types(config: dict[str, Any]) -> None:
    types = config.get("layer_types") or [_FULL] * config["num_hidden_layers"]
    if not isinstance(types, list) or len(types) != config["num_hidden_layers"]:
        raise ConfigError(f"config field layer_types is {types!r}, not one type a layer")
    if unknown := [kind for kind in types if kind not in (_FULL, _SLIDING)]:
        raise ConfigError(
            f"config field layer_types has {unknown[0]!r}: {_FULL} and {_SLIDING} are supported"
        )
    if _SLIDING in types:
        _check_size("sliding_window", config.get("sliding_window"))
        if len({types.count(kind) for kind in types}) > 1:
            raise ConfigError(
                f"config field layer_types has {types.count(_FULL)} layers of {_FULL} and "
                f"{types.count(_SLIDING)} of {_SLIDING}: their KV blocks would differ in size"
            )


def _check_size(field: str, size: Any) -> None:
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"config field {field} is {size!r}, not a positive integer")
