"""Random checkpoints of any family, made of the tensors that its model asks for, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from servelite.kernels.dispatch import REFERENCE
from servelite.layers.build import Build
from servelite.models.registry import build_model

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Heads and intermediate sizes that 2 and 4 divide, a vocabulary that nothing does."""


def random_checkpoint(folder: Path, architecture: str, **changes: Any) -> Path:
    """Save a float32 model to `folder`, with logits of some units; `changes`: of the config."""
    config = SIZES | changes | {"architectures": [architecture]}
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for slot in build_model(architecture, config, Build(REFERENCE)).weights():
        values = torch.randn(slot.whole_shape, generator=generator)
        if slot.name.endswith("norm.weight"):
            tensors[slot.name] = 1 - slot.offset + 0.1 * values
        else:
            tensors[slot.name] = (0.5 if slot.name.endswith("bias") else 0.3) * values
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
