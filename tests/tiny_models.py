"""Tiny random models made by transformers, saved as it saves them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def tiny_llama(folder: Path, *, seed: int = 0, shard: str = "1GB", **changes: Any) -> Any:
    """Save a random LlamaForCausalLM (float32) to `folder` and return it, ready to run.

    Its weights are large enough for logits of some units: with the usual 0.02 they would be noise.
    """
    # transformers pulls in torch's compiler, which makes itself a folder at once.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
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
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(shape | changes))).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    return model
