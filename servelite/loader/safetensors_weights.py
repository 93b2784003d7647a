"""The tensors of a Hugging Face folder: one safetensors file, or shards with an index."""

from __future__ import annotations

from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from servelite.loader.safetensors_damage import find_damage
from servelite.tokenizer.metadata_files import (
    JSON_LIMIT,
    ModelFileError,
    brief,
    decode_json,
    open_regular,
    read_whole,
)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NAME_LIMIT = 255  # bytes of a file's name; Linux's own
_DTYPES = ("F32", "F16", "BF16")
_BUFFER = "embeddings.position_ids"  # integers that old checkpoints hold, and no model here reads


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # tensor -> file in the same folder


class SafetensorsWeights:
    """A `WeightSource` over a folder's safetensors files."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ModelFileError: no weights in the folder, or the index or a file is damaged.
        """
        self.path = folder
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        where = _read_index(folder)
        files = [folder / _SINGLE] if where is None else sorted(set(where.values()))
        self._readers = {file: _open(file) for file in files}
        for file, reader in self._readers.items():
            for name in reader.keys():  # noqa: SIM118 - a safetensors reader is no mapping
                if where is None or where.get(name, file) == file:  # else a copy, which counts for nothing
                    self._add(name, file, reader)
        for name, file in (where or {}).items():
            if name not in self._files:
                raise ModelFileError(file, f"tensor {name!r} is missing, which {_INDEX} says is in this file")

    def _add(self, name: str, file: Path, reader: safe_open) -> None:
        piece = reader.get_slice(name)
        if piece.get_dtype() not in _DTYPES and not name.endswith(_BUFFER):
            known = ", ".join(_DTYPES)
            raise ModelFileError(file, f"tensor {name!r} is of type {piece.get_dtype()}; supported: {known}")
        self._files[name] = file
        self._shapes[name] = tuple(piece.get_shape())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def file_of(self, name: str) -> Path:
        return self._files.get(name, next(iter(self._readers)) if len(self._readers) == 1 else self.path)

    def read(self, name: str, out: Tensor, dim: int = 0, start: int = 0) -> None:
        piece, end = self._readers[self._files[name]].get_slice(name), start + out.shape[dim]
        out.copy_(piece[:, start:end] if dim else piece[start:end])


def _read_index(folder: Path) -> dict[str, Path] | None:
    """Tensor -> file, None where there is one file and no index."""
    index = folder / _INDEX
    try:
        names = decode_json(index, read_whole(index, JSON_LIMIT), _Index).weight_map
    except FileNotFoundError:
        if not (folder / _SINGLE).exists():
            raise ModelFileError(
                folder,
                f"neither {_SINGLE} nor {_INDEX} in this folder; pickled weights (pytorch_model.bin) are "
                "never read, as they can run code: convert them to safetensors (transformers' "
                "save_pretrained)",
            ) from None
        return None
    for name in set(names.values()):
        if name in ("", ".", "..") or Path(name).name != name:
            raise ModelFileError(index, f"names a file outside the folder: {brief(name)}")
        if not name.isprintable() or len(name.encode()) > _NAME_LIMIT:
            raise ModelFileError(index, f"names no file: {brief(name)}")
        if not (folder / name).exists():
            raise ModelFileError(folder / name, f"the file is missing ({_INDEX} names it)")
    return {tensor: folder / name for tensor, name in names.items()}


def _open(file: Path) -> safe_open:
    open_regular(file).close()
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        detail = find_damage(file) or " ".join(str(error).split())
        raise ModelFileError(file, f"not a readable safetensors file ({detail})") from None
