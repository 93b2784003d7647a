"""The tensors of a Hugging Face folder: one safetensors file, or shards with an index."""

from __future__ import annotations

from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from servelite.tokenizer.model_files import ModelFileError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


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
        self._readers = {file: _open(file) for file in _weight_files(folder)}
        for file, reader in self._readers.items():
            for name in reader.keys():  # noqa: SIM118 - a safetensors reader is no mapping
                piece = reader.get_slice(name)
                if piece.get_dtype() not in _DTYPES:
                    known = ", ".join(_DTYPES)
                    raise ModelFileError(
                        file, f"tensor {name!r} is of type {piece.get_dtype()}; supported: {known}"
                    )
                self._files[name] = file
                self._shapes[name] = tuple(piece.get_shape())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def file_of(self, name: str) -> Path:
        return self._files.get(name, next(iter(self._readers)) if len(self._readers) == 1 else self.path)

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self._readers[self._files[name]].get_tensor(name))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise ModelFileError(folder, f"neither {_SINGLE} nor {_INDEX} in this folder")
        return [folder / _SINGLE]
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (OSError, msgspec.DecodeError) as error:
        raise ModelFileError(index, f"cannot be read ({error})") from None
    for name in names:
        if Path(name).name != name:
            raise ModelFileError(index, f"names a file outside the folder: {name!r}")
        if not (folder / name).exists():
            raise ModelFileError(folder / name, f"the file is missing ({_INDEX} names it)")
    return [folder / name for name in sorted(names)]


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelFileError(file, f"not a readable safetensors file ({error})") from None
