"""What is wrong with a safetensors file that cannot be opened, in words that name the tensor.

The library's own words name one now and then; this looks again, only at files that it has refused.
Source of the layout: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

import msgspec

from servelite.tokenizer.metadata_files import open_regular

_HEADER_LIMIT: Final = 100_000_000  # bytes; the library's own
_BITS: Final = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8,
}  # fmt: skip


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]  # within the data, which follows the header


def find_damage(file: Path) -> str:
    """One line on what is wrong; "" where nothing of what is looked for here is."""
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_LIMIT):
                return f"its header runs past the file's end ({size} bytes): an incomplete download?"
            header = msgspec.json.decode(opened.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except RecursionError:
        return "its header is nested too deeply"
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return ""
    held, position = size - 8 - length, 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != position:
            return f"tensor {name!r} begins at byte {begin} of the data, the one before it ends at {position}"
        bits = _BITS.get(entry.dtype)
        if bits is not None and math.prod(entry.shape) * bits != (end - begin) * 8:
            return f"tensor {name!r} has {end - begin} bytes for shape {entry.shape} of {entry.dtype}"
        if end > held:
            return (
                f"tensor {name!r} ends at byte {end} of the data, there are {held}: an incomplete download?"
            )
        position = end
    return ""
