"""A reader of the GGUF container: metadata, and where each tensor's bytes lie.

Only the layout is read here; what a quantised block means is the loader's business. The file is
mapped, not read: opening costs the metadata (a vocabulary of 49k tokens: tens of milliseconds) and
tensor pages are touched by whoever uses them. Every count and length in the file is checked against
the file's size before it is believed, so that a damaged file is an error of one line.

Source of the layout: the GGUF specification, versions 2 and 3, little-endian
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import enum
import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from servelite.tokenizer.metadata_files import ModelFileError, open_regular

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_DIMENSIONS: Final = 4  # of a tensor; GGML's own limit
MAX_ARRAY_DEPTH: Final = 4  # of arrays in arrays
MAX_ARRAY_ELEMENTS: Final = 1 << 24  # the largest vocabularies and merge lists are under 2**20
DEFAULT_ALIGNMENT: Final = 32  # bytes


class GGMLType(enum.IntEnum):
    """How a tensor's elements are stored; the numbers are GGML's."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


BLOCK: Final[dict[GGMLType, tuple[int, int]]] = {
    GGMLType.F32: (1, 4), GGMLType.F16: (1, 2), GGMLType.Q4_0: (32, 18), GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22), GGMLType.Q5_1: (32, 24), GGMLType.Q8_0: (32, 34), GGMLType.Q8_1: (32, 40),
    GGMLType.Q2_K: (256, 84), GGMLType.Q3_K: (256, 110), GGMLType.Q4_K: (256, 144), GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210), GGMLType.Q8_K: (256, 292), GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74), GGMLType.IQ3_XXS: (256, 98), GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18), GGMLType.IQ3_S: (256, 110), GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136), GGMLType.I8: (1, 1), GGMLType.I16: (1, 2), GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8), GGMLType.F64: (1, 8), GGMLType.IQ1_M: (256, 56), GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54), GGMLType.TQ2_0: (256, 66), GGMLType.MXFP4: (32, 17),
}  # fmt: skip
"""Elements and bytes of one block, by type."""

# Metadata value types: the number in the file -> struct format; strings and arrays apart.
_SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_ARRAY_HEAD: Final = struct.Struct("<IQ")


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is row-major, as torch would have it (GGUF stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file. `data` is read-only and keeps the mapping alive as long as it is held."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: memoryview


class _Cursor:
    """Reads forward through the mapping; every read is checked against the file's end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0
        self.place = "header"  # what is being read, for the error text

    def fail(self, detail: str) -> NoReturn:
        raise ModelFileError(self.path, f"damaged GGUF file, {self.place}: {detail}")

    def need(self, count: int) -> int:
        """Claim `count` bytes and return where they start."""
        start = self.position
        if count > self.size - start:
            self.fail(f"needs {count} bytes at offset {start}, the file has {self.size}")
        self.position = start + count
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.buffer, self.need(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.buffer, self.need(8))[0])

    def string(self) -> str:
        start = self.need(self.u64())
        try:
            return self.buffer[start : self.position].decode()
        except UnicodeDecodeError:
            self.fail("a string is not UTF-8")

    def strings(self, count: int) -> list[str]:
        """`count` strings; the loop of a vocabulary, so its checks are inlined."""
        buffer, size, position, unpack = self.buffer, self.size, self.position, _U64.unpack_from
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                (length,) = unpack(buffer, position)
                position += 8
                end = position + length
                if end > size:
                    self.fail(f"string {len(out)} of {count} runs past the file's end")
                append(buffer[position:end].decode())
                position = end
        except UnicodeDecodeError:
            self.fail(f"string {len(out)} of {count} is not UTF-8")
        except struct.error:
            self.fail(f"string {len(out)} of {count} runs past the file's end")
        self.position = position
        return out

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(0)
        form = _SCALARS.get(kind)
        if form is None:
            self.fail(f"unknown value type {kind}")
        item = struct.Struct("<" + form)
        return item.unpack_from(self.buffer, self.need(item.size))[0]

    def array(self, depth: int) -> list[Any]:
        if depth >= MAX_ARRAY_DEPTH:
            self.fail(f"arrays are nested deeper than {MAX_ARRAY_DEPTH}")
        kind, count = _ARRAY_HEAD.unpack_from(self.buffer, self.need(_ARRAY_HEAD.size))
        # The least an element can take, checked before anything is allocated for `count` of them.
        least = {_STRING: 8, _ARRAY: _ARRAY_HEAD.size}.get(kind) or self._scalar_size(kind)
        if count > MAX_ARRAY_ELEMENTS:
            self.fail(f"an array of {count} elements, above the limit of {MAX_ARRAY_ELEMENTS}")
        if count > (self.size - self.position) // least:
            self.fail(f"an array of {count} elements runs past the file's end")
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.array(depth + 1) for _ in range(count)]
        start = self.need(count * least)
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.buffer, start))

    def _scalar_size(self, kind: int) -> int:
        if kind not in _SCALARS:
            self.fail(f"unknown array element type {kind}")
        return struct.calcsize("<" + _SCALARS[kind])


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Map a GGUF file and read its metadata and tensor list.

    Raises:
        ModelFileError: the file cannot be opened, is no GGUF file of a version in `VERSIONS`, or is
            damaged or truncated (a tensor past the file's end counts: no tensor is read here).
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ModelFileError(path, f"not a GGUF file ({size} bytes)")
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(path, f"cannot be opened ({error.strerror})") from None
    cursor = _Cursor(path, buffer)
    if buffer[:4] != MAGIC:
        raise ModelFileError(path, f"not a GGUF file (starts with {buffer[:4]!r})")
    cursor.need(4)
    version = cursor.u32()
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise ModelFileError(path, f"GGUF version {version}; versions {known} (little-endian) can be read")
    tensor_count, pair_count = cursor.u64(), cursor.u64()
    metadata = _read_metadata(cursor, pair_count)
    tensors = _read_tensors(cursor, tensor_count, metadata)
    return GGUFFile(path, version, metadata, tensors, memoryview(buffer))


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        cursor.place = f"metadata entry {index} of {count}"
        key = cursor.string()
        cursor.place = f"metadata key {key!r}"
        if key in metadata:
            cursor.fail("given twice")
        metadata[key] = cursor.value(cursor.u32())
    return metadata


def _read_tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
    found: list[GGUFTensor] = []
    for index in range(count):
        cursor.place = f"tensor entry {index} of {count}"
        name = cursor.string()
        cursor.place = f"tensor {name!r}"
        dimensions = cursor.u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            cursor.fail(f"{dimensions} dimensions")
        shape = tuple(cursor.u64() for _ in range(dimensions))[::-1]
        if 0 in shape:
            cursor.fail("a dimension of 0")
        kind, offset = cursor.u32(), cursor.u64()
        try:
            kind = GGMLType(kind)
        except ValueError:
            cursor.fail(f"unknown type {kind}")
        elements, size = BLOCK[kind]
        if shape[-1] % elements:
            cursor.fail(f"rows of {shape[-1]} are no multiple of {kind.name}'s block of {elements}")
        found.append(GGUFTensor(name, shape, kind, offset, math.prod(shape) // elements * size))
    return _place(cursor, found, metadata)


def _place(cursor: _Cursor, found: list[GGUFTensor], metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
    """Turn offsets within the data section into offsets in the file, and check that all fit."""
    cursor.place = "metadata key 'general.alignment'"
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        cursor.fail(f"{alignment!r} is no positive multiple of 8")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in found:
        cursor.place = f"tensor {tensor.name!r}"
        if tensor.name in tensors:
            cursor.fail("given twice")
        if tensor.offset % alignment:
            cursor.fail(f"offset {tensor.offset} is not aligned to {alignment}")
        offset = start + tensor.offset
        if offset + tensor.nbytes > cursor.size:
            cursor.fail(
                f"ends at byte {offset + tensor.nbytes}, the file has {cursor.size} (an incomplete download?)"
            )
        tensors[tensor.name] = GGUFTensor(tensor.name, tensor.shape, tensor.type, offset, tensor.nbytes)
    return tensors
