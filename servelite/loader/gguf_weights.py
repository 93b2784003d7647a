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

_BAND: Final = 1 << 20  # weights converted at once where the float32 values are not what is kept


class GGUFWeights:
    """A `WeightSource` over a mapped GGUF file."""

    def __init__(self, gguf: GGUFFile, config: dict[str, Any]) -> None:
        """`config`: of the same file, in Hugging Face's naming (head counts undo the permutation)."""
        self.path = gguf.path
        self._gguf = gguf
        architecture = gguf.metadata["general.architecture"]
        kept = [tensor for tensor in gguf.tensors.values() if tensor.name != FREQUENCY_FACTORS]
        self._tensors = hugging_face_tensors(architecture, kept)
        self._permuted_heads: dict[str, int] = {}  # of the whole tensor, by the name's end
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

    def read(self, name: str, out: Tensor, dim: int = 0, start: int = 0) -> None:
        tensor = self._tensors[name]
        if tensor.type not in SUPPORTED:
            known = ", ".join(kind.name for kind in SUPPORTED)
            raise ModelFileError(
                self.path, f"tensor {tensor.name!r} is of type {tensor.type.name}; supported: {known}"
            )
        if len(tensor.shape) == 1:  # one row
            out, dim = out.view(1, -1), 1
        row, column = (0, start) if dim else (start, 0)
        heads = next((n for end, n in self._permuted_heads.items() if name.endswith(end)), 0)
        head_rows = tensor.shape[0] // heads if heads else 0
        one_added = self._norms_have_one_added and name.endswith("norm.weight")
        if out.dtype is torch.float32 and not head_rows and not one_added:
            self._dequantize(tensor, out, row, column)
            return
        rows, width = out.shape
        unit = head_rows or 1
        band = max(1, _BAND // (unit * width)) * unit
        scratch = torch.empty((min(band, rows), width), dtype=torch.float32)
        for begin in range(0, rows, band):
            part = out[begin : begin + band]
            values = scratch[: len(part)]
            self._dequantize(tensor, values, row + begin, column)
            if head_rows:
                # llama.cpp rotates neighbours (2i, 2i + 1) where Hugging Face pairs i with i + d/2, so the
                # converter interleaved the two halves of each head's rows. Here they are parted again.
                paired = values.view(-1, head_rows // 2, 2, width)
                part.view(-1, 2, head_rows // 2, width).copy_(paired.transpose(1, 2))
            else:
                part.copy_(values.sub_(1) if one_added else values)

    def _dequantize(self, tensor: GGUFTensor, out: Tensor, row: int, column: int) -> None:
        """`out`: float32, contiguous, [rows, columns] of the tensor from `row` and `column` on.

        Columns that begin or end within a block: the whole block is converted, and what is over is cut.
        """
        rows, width = out.shape
        elements, size = BLOCK[tensor.type]
        a_row = tensor.shape[-1] // elements  # blocks
        length = a_row * size  # bytes
        raw = np.frombuffer(self._gguf.data, np.uint8, rows * length, tensor.offset + row * length)
        if width == tensor.shape[-1]:
            dequantize(tensor.type, raw, out.view(-1).numpy())
            return
        first, last = column // elements, -(-(column + width) // elements)
        blocks = raw.reshape(rows, a_row, size)[:, first:last]
        cut = slice(column - first * elements, column - first * elements + width)
        band = max(1, _BAND // ((last - first) * elements))
        for begin in range(0, rows, band):
            held = np.ascontiguousarray(blocks[begin : begin + band])
            values = np.empty((len(held), (last - first) * elements), np.float32)
            dequantize(tensor.type, held.reshape(-1), values.reshape(-1))
            out[begin : begin + band] = torch.from_numpy(values[:, cut])
