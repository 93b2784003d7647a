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
from servelite.tokenizer.metadata_files import ModelFileError, brief
from servelite.tokenizer.model_files import ModelFiles

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
    quantisation = files.config.get("quantization_config")
    if quantisation is not None:
        if not isinstance(quantisation, dict):
            field = f"'quantization_config' is {brief(quantisation)}"
            raise ModelFileError(files.path / "config.json", f"{field}, not an object")
        method = brief(quantisation.get("quant_method"))
        raise ModelFileError(files.path, f"weights quantised by {method} are not supported")
    return SafetensorsWeights(files.path)


def check_weights(model: CausalModel, source: WeightSource) -> None:
    """Compare names and shapes alone; a model whose weights have no memory will do.

    Raises:
        ModelFileError: see `load_weights`.
    """
    _checked_slots(model, source, source.shapes())


def load_weights(model: CausalModel, source: WeightSource) -> None:
    """Read every weight of `model`; names and shapes are all checked before the first byte is read.

    A tied model whose file has a head unlike the embedding is untied.

    Raises:
        ModelFileError: a tensor is missing, has another shape, or is one the model does not know.
    """
    shapes = source.shapes()
    slots = _checked_slots(model, source, shapes)
    # As transformers does it: a head in the file that is not the embedding wins over the config's word.
    if _HEAD in shapes and model.ignores(_HEAD) and _differ(_HEAD, _EMBEDDING, source, shapes, model.dtype):
        model.untie_head()
        slots = _checked_slots(model, source, shapes)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in [pool.submit(_fill, slot, source) for slot in slots]:
            done.result()


def _checked_slots(
    model: CausalModel, source: WeightSource, shapes: dict[str, tuple[int, ...]]
) -> list[WeightSlot]:
    slots = list(model.weights())
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
    return slots


def _differ(
    one: str, other: str, source: WeightSource, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> bool:
    """Whether two tensors are unequal once they are of `dtype`."""
    if shapes[one] != shapes[other]:
        return True
    tensors = [torch.empty(shapes[name], dtype=dtype) for name in (one, other)]
    for name, tensor in zip((one, other), tensors, strict=True):
        source.read(name, tensor)
    return not torch.equal(*tensors)


def _fill(slot: WeightSlot, source: WeightSource) -> None:
    source.read(slot.name, slot.tensor)
    if slot.offset:
        slot.tensor.add_(slot.offset)
