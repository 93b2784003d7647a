"""Filling a model with a checkpoint's weights, whatever file they are in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from servelite.layers.weights import WeightSlot
from servelite.loader.gguf_weights import GGUFWeights
from servelite.loader.safetensors_weights import SafetensorsWeights
from servelite.models.base import CausalModel
from servelite.tokenizer.model_files import ModelFileError, ModelFiles


class WeightSource(Protocol):
    """Named tensors of one checkpoint, under Hugging Face's names."""

    path: Path  # what the user named: a file or a folder

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor there is."""
        ...

    def file_of(self, name: str) -> Path:
        """The file that holds (or would hold) the tensor, for error texts."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Copy the tensor into `out` (float32 or bfloat16, contiguous, of its shape). Safe to call from
        several threads.

        Raises:
            ModelFileError: it is stored in a way that is not supported, or cannot be read.
        """
        ...


def open_weights(files: ModelFiles) -> WeightSource:
    """The weights that belong to `files`.

    Raises:
        ModelFileError: there are none, or not in a format that can be read.
    """
    if files.gguf is not None:
        return GGUFWeights(files.gguf, files.config)
    if "quantization_config" in files.config:
        method = files.config["quantization_config"].get("quant_method")
        raise ModelFileError(files.path, f"weights quantised by {method!r} are not supported")
    return SafetensorsWeights(files.path)


def load_weights(model: CausalModel, source: WeightSource) -> None:
    """Read every weight of `model`; names and shapes are all checked before the first byte is read.

    Raises:
        ModelFileError: a tensor is missing, has another shape, or is one the model does not know.
    """
    slots = list(model.weights())
    shapes = source.shapes()
    for slot in slots:
        if slot.name not in shapes:
            raise ModelFileError(source.file_of(slot.name), f"tensor {slot.name!r} is missing")
        if shapes[slot.name] != tuple(slot.tensor.shape):
            raise ModelFileError(
                source.file_of(slot.name),
                f"tensor {slot.name!r} has shape {list(shapes[slot.name])}, "
                f"the config asks for {list(slot.tensor.shape)}",
            )
    wanted = {slot.name for slot in slots}
    for name in shapes:
        if name not in wanted and not model.ignores(name):
            raise ModelFileError(source.file_of(name), f"tensor {name!r} is not one of this architecture's")
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in [pool.submit(_fill, slot, source) for slot in slots]:
            done.result()


def _fill(slot: WeightSlot, source: WeightSource) -> None:
    source.read(slot.name, slot.tensor)
    if slot.offset:
        slot.tensor.add_(slot.offset)
