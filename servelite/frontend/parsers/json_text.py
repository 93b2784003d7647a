"""JSON as a model writes it: checked while it is copied, so that what is passed on is valid."""

from __future__ import annotations

import json
import math
import re
import sys
from json.encoder import encode_basestring
from typing import Any, Final

from servelite.frontend.parsers.reader import Emit, NotACall, Reader, Steps, Truncated

MAX_DEPTH: Final = 128
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z]+")
_VALID_SCALAR: Final = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_SCALAR_BEGINNING: Final = re.compile(
    r"t|tr|tru|true|f|fa|fal|fals|false|n|nu|nul|null|-|-?(?:0|[1-9]\d*)(?:\.\d*)?(?:(?<=\d)[eE][-+]?\d*)?",
    re.ASCII,
)
_HEX: Final = re.compile(r"[0-9A-Fa-f]+")
_SPACES: Final = re.compile(r"[ \t\r\n]+")
_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


def dump(value: Any) -> str:
    """JSON with non-ASCII characters as they are; half of a surrogate pair, which has no UTF-8, escaped.

    A number that was beyond a double's range, and so is read as infinity, becomes the largest.

    Raises:
        ValueError: not a number, or a whole number of thousands of digits.
    """
    try:
        text = _encode(value)
    except ValueError:
        value = _finite(value)
        text = _encode(value)
    return json.dumps(value, allow_nan=False) if _SURROGATE.search(text) else text


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return math.copysign(sys.float_info.max, value) if value in (math.inf, -math.inf) else value


def escaped(text: str) -> str:
    """What stands between the quotes of a JSON string; `text` holds no half of a surrogate pair."""
    return encode_basestring(text)[1:-1]


def copy_string(reader: Reader, emit: Emit) -> Steps[None]:
    """Copy a string with its quotes. A control character that stands in it as such is escaped."""
    yield from reader.expect('"')
    emit('"')
    while True:
        run = _PLAIN.match(reader.text, reader.at)
        if run is not None:
            reader.at = run.end()
            emit(run[0])
        if reader.at == len(reader.text) and not reader.ended:  # the rule, a token a time: soon back here
            yield
            continue
        character = yield from reader.peek()
        if character == '"':
            reader.at += 1
            emit('"')
            return
        if character == "\\":
            yield from _copy_escape(reader, emit)
        elif character < " ":
            reader.at += 1
            emit(json.dumps(character)[1:-1])


def _copy_escape(reader: Reader, emit: Emit) -> Steps[None]:
    while len(reader.text) - reader.at < 2:
        if reader.ended:
            raise Truncated
        yield
    kind = reader.text[reader.at + 1]
    if kind == "u":
        while len(reader.text) - reader.at < 6 and not reader.ended:
            yield
        digits = reader.text[reader.at + 2 : reader.at + 6]
        if len(digits) < 4:
            raise Truncated
        if not _HEX.fullmatch(digits):
            raise NotACall
        emit("\\u" + digits)
        reader.at += 6
    elif kind in '"\\/bfnrt':
        emit("\\" + kind)
        reader.at += 2
    else:
        raise NotACall


def read_string(reader: Reader) -> Steps[str]:
    """The value of a string."""
    parts: list[str] = []
    yield from copy_string(reader, parts.append)
    return str(json.loads("".join(parts)))


def copy_value(reader: Reader, emit: Emit) -> Steps[None]:
    """Copy one value, to its last character.

    Raises:
        NotACall: here it is no JSON; what was handed on is a valid beginning.
        Truncated: the text ends first.
    """
    closers: list[str] = []
    while True:
        character = yield from _space(reader, emit)
        if character in "{[":
            if len(closers) == MAX_DEPTH:
                raise NotACall
            _take(reader, emit)
            closers.append("}" if character == "{" else "]")
            if (yield from _space(reader, emit)) != closers[-1]:
                if character == "{":
                    yield from _copy_key(reader, emit)
                continue
            _take(reader, emit)
            closers.pop()
        elif character == '"':
            yield from copy_string(reader, emit)
        else:
            yield from _copy_scalar(reader, emit)
        while closers:
            character = yield from _space(reader, emit)
            if character == closers[-1]:
                _take(reader, emit)
                closers.pop()
                continue
            if character != ",":
                raise NotACall
            _take(reader, emit)
            if closers[-1] == "}":
                yield from _copy_key(reader, emit)
            break
        if not closers:
            return


def _take(reader: Reader, emit: Emit) -> None:
    emit(reader.text[reader.at])
    reader.at += 1


def _space(reader: Reader, emit: Emit) -> Steps[str]:
    spaces = yield from reader.run(_SPACES)
    if spaces:
        emit(spaces)
    return (yield from reader.peek())


def _copy_key(reader: Reader, emit: Emit) -> Steps[None]:
    if (yield from _space(reader, emit)) != '"':
        raise NotACall
    yield from copy_string(reader, emit)
    if (yield from _space(reader, emit)) != ":":
        raise NotACall
    _take(reader, emit)


def _copy_scalar(reader: Reader, emit: Emit) -> Steps[None]:
    text = yield from reader.run(_SCALAR)
    cut = reader.ended and reader.at == len(reader.text)
    if cut and text and _SCALAR_BEGINNING.fullmatch(text):
        emit(text)
        raise Truncated
    if cut or not _VALID_SCALAR.fullmatch(text):
        reader.at -= len(text)
        raise NotACall
    emit(text)
