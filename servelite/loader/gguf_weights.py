"""The tensors of a GGUF file under Hugging Face's names, in Hugging Face's layout and conventions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from servelite.loader.gguf_dequantize import SUPPORTED, dequantize
from servelite.loader.gguf_names import FREQUENCY_FACTORS, hugging_face_tensors
from servelite.tokenizer.gguf import BLOCK, GGUFFile, GGUFTensor
from servelite.tokenizer.metadata_files import ModelFileError

_PIECE: Final = 1 << 20  # weights converted at once where the float32 values are not what is kept


class GGUFWeights:
    """A `WeightSource` over a mapped GGUF file."""

    def __init__(self, gguf: GGUFFile, config: dict[str, Any]) -> None:
        """`config`: of the same file, in Hugging Face's naming (head counts undo the permutation)."""
        self.path = gguf.path
        self._gguf = gguf
        architecture = gguf.metadata["general.architecture"]
        kept = [tensor for tensor in gguf.tensors.values() if tensor.name != FREQUENCY_FACTORS]
        self._tensors = hugging_face_tensors(architecture, kept)
        self._permuted_heads: dict[str, int] = {}
        if architecture == "llama":
            self._permuted_heads = {
                "q_proj.weight": config["num_attention_heads"],
                "k_proj.weight": config["num_key_value_heads"],
            }
        self._norms_have_one_added = architecture == "gemma3"

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
            rows = torch.empty(out.shape, dtype=torch.float32)
            self._dequantize(tensor, rows)
            paired = rows.view(heads, -1, 2, out.shape[-1])
            out.view(heads, 2, -1, out.shape[-1]).copy_(paired.transpose(1, 2))
        elif self._norms_have_one_added and name.endswith("norm.weight"):
            norm = torch.empty(out.shape, dtype=torch.float32)
            self._dequantize(tensor, norm)
            out.copy_(norm - 1)
        else:
            self._dequantize(tensor, out)

    def _dequantize(self, tensor: GGUFTensor, out: Tensor) -> None:
        """`out`: contiguous; of another type than float32 it is filled piece by piece."""
        raw = np.frombuffer(self._gguf.data, np.uint8, tensor.nbytes, tensor.offset)
        flat = out.view(-1)
        if out.dtype is torch.float32:
            dequantize(tensor.type, raw, flat.numpy())
            return
        elements, size = BLOCK[tensor.type]
        scratch = torch.empty(min(_PIECE, len(flat)), dtype=torch.float32)
        for begin in range(0, len(flat), _PIECE):
            part = flat[begin : begin + _PIECE]
            piece = scratch[: len(part)]
            first, last = begin // elements * size, (begin + len(part)) // elements * size
            dequantize(tensor.type, raw[first:last], piece.numpy())
            part.copy_(piece)
