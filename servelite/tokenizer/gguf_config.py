"""A GGUF file's metadata in the naming of Hugging Face's config.json.

GGUF keeps less than a config.json: what an architecture always has is not in the file, and comes from
its row of `ARCHITECTURES` here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from servelite.tokenizer.config_limits import LIMITS, check_sizes
from servelite.tokenizer.gguf import GGMLType, GGUFFile
from servelite.tokenizer.metadata_files import ModelFileError, brief

# GGUF key below "<architecture>." -> config.json key.
_KEYS: Final = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_NEEDED: Final = (
    "embedding_length", "block_count", "feed_forward_length", "attention.head_count", "context_length",
)  # fmt: skip
_PER_LAYER: Final = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
_REAL: Final = ("rms_norm_eps", "rope_theta", "attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture` whose metadata is fully translated."""

    name: str  # Hugging Face's class
    fixed: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[GGUFFile, dict[str, Any]], None] | None = None  # what takes more than a key


def config_from_gguf(gguf: GGUFFile) -> dict[str, Any]:
    """The metadata of `gguf` as a config.json; complete for `ARCHITECTURES`, for others what is common.

    An architecture that is not there keeps its GGUF name, for the model registry to refuse by.

    Raises:
        ModelFileError: a key or tensor that every model has is absent or of the wrong kind.
    """
    metadata, tensors = gguf.metadata, gguf.tensors
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelFileError(gguf.path, "metadata key 'general.architecture' is absent or no string")
    if (parts := metadata.get("split.count", 1)) != 1:
        raise ModelFileError(
            gguf.path, f"one of {parts} parts of a model; join them first: llama-gguf-split --merge"
        )
    for key in _NEEDED:
        if f"{name}.{key}" not in metadata:
            raise ModelFileError(gguf.path, f"metadata key '{name}.{key}' is absent")
    known = ARCHITECTURES.get(name, Architecture(name))
    config: dict[str, Any] = {"architectures": [known.name], "model_type": name}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0} | known.fixed
    for key, ours in _KEYS.items():
        full = f"{name}.{key}"
        if full in metadata and (metadata[full] != 0 or key in _NEEDED):
            per_layer = key in _PER_LAYER and name not in ARCHITECTURES
            config[ours] = _number(gguf, full, ours, per_layer=per_layer)
    # In the file the epsilon is a float32; the model was made with the short decimal next to it.
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    if "head_dim" not in config:
        rotary = f"{name}.rope.dimension_count"
        config["head_dim"] = (
            _number(gguf, rotary, "head_dim")
            if metadata.get(rotary, 0) != 0
            else config["hidden_size"] // (heads if isinstance(heads, int) else heads[0])
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(gguf.path, "tensor 'token_embd.weight' is absent or no matrix")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["rope_scaling"] = _rope_scaling(gguf, name)
    for ours, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        config[ours] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if known.finish is not None:
        known.finish(gguf, config)
    check_sizes(gguf.path, config)
    return config


def _number(gguf: GGUFFile, key: str, ours: str, *, per_layer: bool = False) -> Any:
    """A positive finite number within the limit of config field `ours`; `per_layer`: or a list of such,
    as families have whose layers differ."""
    value = gguf.metadata[key]
    kind = (int, float) if ours in _REAL else int
    values = value if per_layer and isinstance(value, list) and value else [value]
    limit = LIMITS.get(ours, math.inf)
    for one in values:
        if isinstance(one, bool) or not isinstance(one, kind) or not 0 < one < math.inf:
            raise ModelFileError(gguf.path, f"metadata key {key!r} is {brief(value)}, no positive number")
        if one > limit:
            raise ModelFileError(
                gguf.path, f"metadata key {key!r} is {brief(value)}, above the limit of {limit}"
            )
    return value


# ---------------------------------------------------------------- RoPE scaling

# Which of a scaling's GGUF keys have another name in config.json.
_SCALING_KEYS: Final = {
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_FACTORS: Final = "rope_freqs.weight"


def _rope_scaling(gguf: GGUFFile, name: str) -> dict[str, Any] | None:
    """RoPE scaling, None for none."""
    if _FACTORS in gguf.tensors:
        return _llama3_scaling(gguf, name)
    prefix = f"{name}.rope.scaling."
    found = {key[len(prefix) :]: value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    kind = found.pop("type", "none")
    found.pop("finetuned", None)  # says nothing of the computation
    if kind == "none":
        return None
    return {"rope_type": kind} | {_SCALING_KEYS.get(key, key): value for key, value in found.items()}


def _llama3_scaling(gguf: GGUFFile, name: str) -> dict[str, Any]:
    """Llama 3.1's scaling, of which GGUF keeps only what each frequency is divided by.

    The published models have one set of numbers and two factors: where these give the file's divisors
    they are meant. Any others have a type of their own, which is refused by name.
    """
    tensor = gguf.tensors[_FACTORS]
    unknown = {"rope_type": "gguf_frequency_factors", "tensor": _FACTORS}
    size = gguf.metadata.get(f"{name}.rope.dimension_count")
    if tensor.type is not GGMLType.F32 or not isinstance(size, int) or tensor.shape != (size // 2,):
        return unknown
    divisors = np.frombuffer(gguf.data, "<f4", size // 2, tensor.offset)
    low, high, original, factor = 1.0, 4.0, 8192, float(divisors.max())
    base = gguf.metadata.get(f"{name}.rope.freq_base", 10000.0)
    turns = original * base ** (-np.arange(0, size, 2) / size) / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(divisors, 1 / (kept + (1 - kept) / factor), rtol=1e-4):
        return unknown
    return {
        "rope_type": "llama3",
        "factor": round(factor, 3),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# ---------------------------------------------------------------- what each architecture has besides


def _finish_llama(gguf: GGUFFile, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors
    if config.get("num_local_experts"):
        config["architectures"] = ["MixtralForCausalLM"]


def _finish_qwen3moe(gguf: GGUFFile, config: dict[str, Any]) -> None:
    key = "qwen3moe.expert_feed_forward_length"
    if key not in gguf.metadata or "num_local_experts" not in config:
        raise ModelFileError(gguf.path, f"metadata key {key!r} or 'qwen3moe.expert_count' is absent")
    config["moe_intermediate_size"] = _number(gguf, key, "moe_intermediate_size")
    config["num_experts"] = config.pop("num_local_experts")


_GEMMA3_PERIOD: Final = 6  # every sixth layer sees all
_GEMMA3_27B_LAYERS: Final = 62  # the one size that scales attention by hidden size / heads


def _finish_gemma3(gguf: GGUFFile, config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    period = gguf.metadata.get("gemma3.attention.sliding_window_pattern", _GEMMA3_PERIOD)
    if type(period) is int and period > 0:
        sliding = [(layer + 1) % period != 0 for layer in range(layers)]
    elif isinstance(period, list) and len(period) == layers:
        sliding = [bool(one) for one in period]
    else:
        key = "gemma3.attention.sliding_window_pattern"
        raise ModelFileError(gguf.path, f"metadata key {key!r} is {brief(period)}")
    config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in sliding]
    if "gemma3.rope.freq_base_swa" in gguf.metadata:
        config["rope_local_base_freq"] = _number(gguf, "gemma3.rope.freq_base_swa", "rope_theta")
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"]
        if layers == _GEMMA3_27B_LAYERS
        else config["head_dim"]
    )


ARCHITECTURES: Final = {
    "llama": Architecture("LlamaForCausalLM", finish=_finish_llama),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM", {"attention_bias": False}),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", {"attention_bias": False, "norm_topk_prob": True}, _finish_qwen3moe
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "attention_bias": False,
        },
        _finish_gemma3,
    ),
}
"""By `general.architecture`."""
