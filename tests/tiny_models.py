"""Tiny random models made by transformers, saved as it saves them."""

from __future__ import annotations

import json
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


def tiny_llama(folder: Path, *, seed: int = 0, shard: str = "1GB", **changes: Any) -> Any:
    """Save a random LlamaForCausalLM (float32) to `folder` and return it, ready to run."""
    # transformers pulls in torch's compiler, which makes itself a folder at once.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | changes))).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def tiny_windowed_llama(folder: Path, *, window: int, seed: int = 0, **changes: Any) -> Any:
    """As `tiny_llama`, every second layer with a window of `window` tokens.

    transformers' Llama has no windows. Its Qwen2 has, and is a Llama but for three biases: without
    those, it is the oracle for the same weights.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = SHAPE | {"num_hidden_layers": 4} | changes
    layers = shape["num_hidden_layers"]
    types = ["sliding_attention" if layer % 2 else "full_attention" for layer in range(layers)]
    torch.manual_seed(seed)
    config = Qwen2Config(**shape, layer_types=types, use_sliding_window=True, sliding_window=window)
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
    kept = {name: weight for name, weight in model.state_dict().items() if not name.endswith("bias")}
    model.save_pretrained(folder, state_dict=kept)
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    assert (saved["layer_types"], saved["sliding_window"]) == (types, window)
    path.write_text(json.dumps(saved | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return model
