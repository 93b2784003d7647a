"""Opening and reading the files of a model, which come from strangers: every one is opened here.

Only regular files are opened, since a pipe in a model's folder would make the open wait for ever; and
what is read whole has a limit, checked before the memory for it is taken.
"""

from __future__ import annotations

import errno
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

JSON_LIMIT: Final = 64 << 20  # bytes; the index of a thousand shards takes a few of these mebibytes
TOKENIZER_LIMIT: Final = 256 << 20  # bytes of tokenizer.json; Gemma's takes 33 MB
TEMPLATE_LIMIT: Final = 1 << 20  # bytes of a chat template; the longest known take 20 kB

_T = TypeVar("_T")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


class ModelFileError(ValueError):
    """A model's file or folder that cannot be used; one line, naming the file and the place in it."""

    def __init__(self, path: str | os.PathLike[str], detail: str) -> None:
        super().__init__(f"{os.fspath(path)}: {detail}")
        self.path = os.fspath(path)
        self.detail = detail


def brief(value: Any) -> str:
    """The `repr` of a value from a file, shortened: it may be a list of a million numbers."""
    return _short.repr(value)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; the open itself never waits.

    Raises:
        FileNotFoundError: there is none.
        ModelFileError: it is a folder, a pipe, a device or a socket, or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ENXIO:  # what a socket answers
            raise ModelFileError(path, "not a regular file") from None
        raise ModelFileError(path, f"cannot be opened ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelFileError(path, "not a regular file")
    return os.fdopen(descriptor, "rb")


def read_whole(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        FileNotFoundError: there is none.
        ModelFileError: see `open_regular`; or it is larger, or cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ModelFileError(path, f"{size} bytes, above the limit of {limit} for such a file")
        try:
            return file.read(size)
        except OSError as error:
            raise ModelFileError(path, f"cannot be read ({error.strerror})") from None


def decode_json(path: Path, content: bytes, kind: type[_T]) -> _T:
    """`content` (that of the file `path`) as a `kind`.

    Raises:
        ModelFileError: it is no JSON, nested too deeply, or of another form than `kind`.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError:
        raise ModelFileError(path, "nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ModelFileError(path, f"damaged ({error})") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(path, f"not valid JSON ({error})") from None
