"""The tensors of a GGUF file under Hugging Face's names, in Hugging Face's layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from servelite.loader.gguf_dequantize import SUPPORTED, dequantize
from servelite.tokenizer.gguf import GGUFFile, GGUFTensor, ModelFileError

# Of the `llama` architecture: GGUF's name -> Hugging Face's, below "blk.N." and "model.layers.N.".
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """Hugging Face's name of GGUF tensor `name`; a name that is not known stays as it is."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    found = _LAYER.fullmatch(name)
    if found and found[2] in _LAYER_NAMES:
        return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}.{found[3]}"
    return name


class GGUFWeights:
    """A `WeightSource` over a mapped GGUF file."""

    def __init__(self, gguf: GGUFFile, config: dict[str, Any]) -> None:
        """`config`: of the same file, in Hugging Face's naming (head counts undo the permutation)."""
        self.path = gguf.path
        self._gguf = gguf
        self._tensors = {hugging_face_name(name): tensor for name, tensor in gguf.tensors.items()}
        self._permuted_heads = {
            "q_proj.weight": config["num_attention_heads"],
            "k_proj.weight": config["num_key_value_heads"],
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def file_of(self, name: str) -> Path:
        return self.path

    def read(self, name: str, out: Tensor) -> None:
        tensor = self._tensors[name]
        if tensor.type not in SUPPORTED:
            known = ", ".join(kind.name for kind in SUPPORTED)
            raise ModelFileError(
                self.path, f"tensor {tensor.name!r} is of type {tensor.type.name}; supported: {known}"
            )
        heads = next((n for end, n in self._permuted_heads.items() if name.endswith(end)), 0)
        if heads:
            # llama.cpp rotates neighbours (2i, 2i + 1) where Hugging Face pairs i with i + d/2, so the
            # converter interleaved the two halves of each head's rows. Here they are parted again.
            rows = torch.empty_like(out)
            self._dequantize(tensor, rows)
            paired = rows.view(heads, -1, 2, out.shape[-1])
            out.view(heads, 2, -1, out.shape[-1]).copy_(paired.transpose(1, 2))
        else:
            self._dequantize(tensor, out)

    def _dequantize(self, tensor: GGUFTensor, out: Tensor) -> None:
        raw = np.frombuffer(self._gguf.data, np.uint8, tensor.nbytes, tensor.offset)
        dequantize(tensor.type, raw, out.view(-1).numpy())
