"""GGUF's tensor names in Hugging Face's, by architecture."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from servelite.tokenizer.gguf import GGUFTensor

# GGUF's name -> Hugging Face's, below "blk.N." and "model.layers.N.".
_COMMON: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF: Final = {
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
# Of tensors that hold all experts of a layer, one after the other: Hugging Face's name of one.
_EXPERTS: Final = {
    "llama": {
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "qwen3moe": {
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
}
_OUTER: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")

FREQUENCY_FACTORS: Final = "rope_freqs.weight"
"""No weight: the configuration's RoPE scaling says what is in it."""


def hugging_face_name(architecture: str, name: str) -> str:
    """Hugging Face's name of GGUF tensor `name`; a name that is not known stays as it is.

    Args:
        architecture: the file's `general.architecture`.
    """
    if name in _OUTER:
        return _OUTER[name]
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    part = _OF.get(architecture, {}).get(found[2]) or _COMMON.get(found[2])
    return name if part is None else f"model.layers.{found[1]}.{part}.{found[3]}"


def hugging_face_tensors(architecture: str, tensors: Iterable[GGUFTensor]) -> dict[str, GGUFTensor]:
    """A file's tensors by Hugging Face's names, those of all experts divided into one for each."""
    found: dict[str, GGUFTensor] = {}
    for tensor in tensors:
        match = _LAYER.fullmatch(tensor.name)
        expert = _EXPERTS.get(architecture, {}).get(match[2]) if match else None
        if match is None or expert is None or len(tensor.shape) != 3:
            found[hugging_face_name(architecture, tensor.name)] = tensor
            continue
        count, size = tensor.shape[0], tensor.nbytes // tensor.shape[0]
        for index in range(count):
            one = replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + index * size, nbytes=size)
            found[f"model.layers.{match[1]}.{expert.format(index)}.{match[3]}"] = one
    return found
