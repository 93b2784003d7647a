"""Tiny random models made by transformers, saved as it saves them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
"""Weights large enough for logits of some units: with the usual range of 0.02 they would be noise."""

EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def tiny_model(folder: Path, family: str, *, seed: int = 0, shard: str = "1GB", **changes: Any) -> Any:
    """Save a random model (float32) to `folder` and return it, ready to run.

    Args:
        family: transformers' name of it without its ending: "Llama" of LlamaForCausalLM and LlamaConfig.
        changes: fields of the config; SHAPE has the others.
    """
    # transformers pulls in torch's compiler, which makes itself a folder at once.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    import transformers

    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config(**(SHAPE | changes))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # made as zeros or ones, which would hide a norm or bias left out
                weight.add_(torch.randn(weight.shape) * (0.5 if name.endswith("bias") else 0.1))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def tiny_llama(folder: Path, *, seed: int = 0, shard: str = "1GB", **changes: Any) -> Any:
    """A random LlamaForCausalLM, as `tiny_model`."""
    return tiny_model(folder, "Llama", seed=seed, shard=shard, **changes)


def tiny_windowed_qwen2(folder: Path, *, window: int, seed: int = 0, **changes: Any) -> Any:
    """A random Qwen2ForCausalLM with a window of `window` tokens in every second layer, as `tiny_model`."""
    layers = changes.setdefault("num_hidden_layers", 4)
    types = ["sliding_attention" if layer % 2 else "full_attention" for layer in range(layers)]
    return tiny_model(
        folder,
        "Qwen2",
        seed=seed,
        layer_types=types,
        use_sliding_window=True,
        sliding_window=window,
        **changes,
    )


def tiny_gemma3(folder: Path, *, window: int, seed: int = 0, **changes: Any) -> Any:
    """A random Gemma3ForCausalLM: of seven layers, the sixth sees all, the others their window."""
    shape = {"num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
    return tiny_model(folder, "Gemma3", seed=seed, sliding_window=window, **(shape | changes))


def tiny_moe(folder: Path, family: str = "Qwen3Moe", *, seed: int = 0, **changes: Any) -> Any:
    """A random model of 8 experts, 2 of them for each token, as `tiny_model`."""
    return tiny_model(folder, family, seed=seed, **(EXPERTS | changes))
