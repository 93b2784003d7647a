"""Filling a model with a checkpoint's weights, whatever file they are in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from servelite.kernels.collective import ONE_RANK, Collective
from servelite.layers.weights import WeightSlot
from servelite.loader.gguf_weights import GGUFWeights
from servelite.loader.safetensors_weights import SafetensorsWeights
from servelite.models.base import Model
from servelite.tokenizer.metadata_files import ModelFileError, brief
from servelite.tokenizer.model_files import ModelFiles

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BAND: Final = 1 << 20  # values compared at once


class WeightSource(Protocol):
    """Named tensors of one checkpoint, under Hugging Face's names."""

    path: Path  # what the user named: a file or a folder

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor there is."""

    def file_of(self, name: str) -> Path:
        """The file that holds (or would hold) the tensor, for error texts."""

    def read(self, name: str, out: Tensor, dim: int = 0, start: int = 0) -> None:
        """Copy the tensor, or what `out` has room for of its dimension `dim`, from `start` on, and nothing
        else is read. Safe to call from several threads.

        Args:
            out: float32 or bfloat16, contiguous, of the tensor's shape but for `dim`.
            dim: 0 or 1.

        Raises:
            ModelFileError: it is stored in a way that is not supported, or cannot be read.
        """


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


class _Prefixed:
    """A `WeightSource` whose names all begin with `prefix`, which those in the file do not."""

    def __init__(self, source: WeightSource, prefix: str) -> None:
        self.path = source.path
        self._source, self._prefix = source, prefix

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self._prefix + name: shape for name, shape in self._source.shapes().items()}

    def file_of(self, name: str) -> Path:
        return self._source.file_of(name.removeprefix(self._prefix))

    def read(self, name: str, out: Tensor, dim: int = 0, start: int = 0) -> None:
        self._source.read(name.removeprefix(self._prefix), out, dim, start)


def with_prefix(source: WeightSource, prefix: str) -> WeightSource:
    """`source`, its tensors named as in a checkpoint with a head: one that was saved without may leave the
    prefix out."""
    names = source.shapes()
    return source if any(name.startswith(prefix) for name in names) else _Prefixed(source, prefix)


def check_weights(model: Model, source: WeightSource) -> None:
    """Compare names and whole shapes alone; a model whose weights have no memory will do.

    Raises:
        ModelFileError: see `load_weights`.
    """
    _checked_slots(model, source, source.shapes())


def load_weights(model: Model, source: WeightSource, group: Collective = ONE_RANK) -> None:
    """Read every weight of `model`, or the rank's part of each; names and shapes are all checked before the
    first byte is read.

    A tied model whose file has a head unlike the embedding is untied.

    Args:
        group: the ranks that share the model; each of them calls this.

    Raises:
        ModelFileError: a tensor is missing, has another shape, or is one the model does not know.
    """
    shapes = source.shapes()
    slots = _checked_slots(model, source, shapes)
    # As transformers does it: a head in the file that is not the embedding wins over the config's word.
    tied = _HEAD in shapes and model.ignores(_HEAD)
    if model.task == "generate" and tied and _head_differs(slots, source, shapes, group):
        model.untie_head()
        slots = _checked_slots(model, source, shapes)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in [pool.submit(_fill, slot, source) for slot in slots]:
            done.result()


def _checked_slots(
    model: Model, source: WeightSource, shapes: dict[str, tuple[int, ...]]
) -> list[WeightSlot]:
    slots = list(model.weights())
    for slot in slots:
        if slot.name not in shapes:
            raise ModelFileError(source.file_of(slot.name), f"tensor {slot.name!r} is missing")
        if shapes[slot.name] != slot.whole_shape:
            raise ModelFileError(
                source.file_of(slot.name),
                f"tensor {slot.name!r} has shape {list(shapes[slot.name])}, "
                f"the config asks for {list(slot.whole_shape)}",
            )
    wanted = {slot.name for slot in slots}
    for name in shapes:
        if name not in wanted and not model.ignores(name):
            raise ModelFileError(source.file_of(name), f"tensor {name!r} is not one of this architecture's")
    return slots


def _head_differs(
    slots: list[WeightSlot], source: WeightSource, shapes: dict[str, tuple[int, ...]], group: Collective
) -> bool:
    """Whether the file's head is unlike its embedding, once both are of the model's type.

    Each rank compares its own rows; what one of them finds holds for all.
    """
    if shapes[_HEAD] != shapes[_EMBEDDING]:
        return True
    embedding = next(slot for slot in slots if slot.name == _EMBEDDING)
    found = torch.tensor([[_rows_differ(embedding, source)]], dtype=torch.int32)
    return bool(group.all_gather(found).any())


def _rows_differ(embedding: WeightSlot, source: WeightSource) -> bool:
    """The same of the rows that `embedding` takes, a band at a time: no table has a copy in memory."""
    rows, width = embedding.tensor.shape
    band = max(1, _BAND // width)
    tables = torch.empty((2, min(band, rows), width), dtype=embedding.tensor.dtype)
    for begin in range(0, rows, band):
        head, table = tables[:, : rows - begin]
        source.read(_HEAD, head, 0, embedding.start + begin)
        source.read(_EMBEDDING, table, 0, embedding.start + begin)
        if not torch.equal(head, table):
            return True
    return False


def _fill(slot: WeightSlot, source: WeightSource) -> None:
    source.read(slot.name, slot.tensor, slot.dim, slot.start)
    if slot.offset:
        slot.tensor.add_(slot.offset)
