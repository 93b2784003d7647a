r"""Patterns as the compiler must read them: what it matches, ECMA-262 (as JSON Schema) and `re` match too.

ECMA-262 knows no sets within a list of characters, has only ASCII in `\w` and `\d`, and other spaces in `\s`
and ends of lines in `.` than the compiler. Where `re` has it otherwise, what both match is left.

Strings have five control characters: `\b`, `\f`, `\n`, `\r`, `\t`. The others would take `\u`, which would
let a key be spelled in two ways; the compiler leaves them out of values and patterns without a word. A list
with all of them, but for `\n`, it takes for one with `"` and the backslash too: so NUL, which is never
written, is taken out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

CONTROLS: Final = r"no control characters but \b, \f, \n, \r and \t are written in strings"
UNWRITTEN: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

_CHARACTER: Final = re.compile(r"\\[xuUpP]\{[^}]{0,50}\}|\\x..|\\u.{4}|\\U.{8}|\\[pP].|\\.|.", re.DOTALL)
_PART: Final = re.compile(rf"\[\^?\]?(?:\[:\^?\w+:\]|\\.?|[^\]\\])*(?:\]|\Z)|{_CHARACTER.pattern}", re.DOTALL)
_IN_LIST: Final = re.compile(r"\\[xuUpP]\{[^}]*\}|\\.|\[:\^?\w+:\]|\[|&&|--|~~", re.DOTALL)
_CODE: Final = re.compile(
    r"\\[xuU]\{?((?<=x)[0-9A-Fa-f]{2}|(?<=u)[0-9A-Fa-f]{4}|(?<=U)[0-9A-Fa-f]{8}|(?<=\{)[0-9A-Fa-f]{1,8})\}?"
)
_DOT_IS_ALL: Final = re.compile(r"\(\?[a-zA-Z]*s")
_LOOKS_AROUND: Final = re.compile(r"\(\?<?[=!]|\\")
_POSIX: Final = re.compile(r".\[:\^?\w+:\]")
_BACK: Final = frozenset("123456789bB")  # after a backslash, not in a list

# As pydantic writes a Decimal in a string: by look-ahead it has a digit, and not more of them than it may.
_DECIMAL: Final = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)(\[\+-\]\?0\*)(?:\(\?:)?\\d(?:\*|\{0,([1-9]\d*)\})(?:(\\\..*)"
    r"|\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)(?:\\d\{0,\d+\}(\\\.\\d\{0,\d+\}0\*)|\\d\*\\\.\\d\*0\*)\$\))"
)
_ASCII: Final = "".join(map(chr, range(128)))
_AS_WRITTEN: Final = {"[": r"\[", r"\b": r"\x08", "&&": r"&\&", "--": r"-\-", "~~": r"~\~"}
_NARROW: Final = {
    ".": r"[^\n\r\x{2028}\x{2029}]",
    r"\W": r"[^\p{L}\p{N}_]",
    r"\D": r"\P{Nd}",
    r"\s": r"[\s--\x85]",
    r"\S": r"[\S--\x{feff}]",
}
_WIDE: Final = {r"\w": r"\p{L}\p{N}_", r"\d": r"\p{Nd}", r"\s": r"\s\x{feff}", r"\S": r"\S\x85"}
"""What is within `[^...]`: the wider, the less is matched."""


def narrowed(pattern: str) -> str:
    """A regular expression that the compiler follows rightly; raises `ValueError` where there is none."""
    decimal = _DECIMAL.fullmatch(pattern)
    if decimal is not None:  # with a digit before the point
        sign, most, rest, fraction = decimal.groups()
        pattern = f"^{sign}\\d{{1,{most or ''}}}{rest or (f'({fraction})?$' if fraction else '$')}"
    made, dot_is_all = list[str](), _DOT_IS_ALL.search(pattern)
    parts = [one[0] for one in _PART.finditer(pattern)]
    if _LOOKS_AROUND.search("".join(part for part in parts if part[0] not in "[\\" or part[1:] in _BACK)):
        raise ValueError("look-around (\\b too) and back-references are not enforced")
    for part in parts:
        if _POSIX.search(part):
            raise ValueError("a POSIX class is one to some readers only; write the characters")
        if part.startswith(("[", r"\p", r"\P")):
            part = _in_list(part, _AS_WRITTEN)
            members = _members(part)
            if members is None:
                if any(_is_unwritten(inner[0]) for inner in _CHARACTER.finditer(part)):
                    raise ValueError(CONTROLS)
            elif len(members) == 1 and UNWRITTEN.match("".join(members)) and not part.startswith("[^"):
                raise ValueError(CONTROLS)
            part = _in_list(part, _WIDE if part.startswith("[^") else _NARROW)
            if members is None or ("\0" in members and not members >= {'"', "\\"}):
                part = rf"[{part}--\x00]"
        elif _is_unwritten(part):
            raise ValueError(CONTROLS)
        elif part != "." or not dot_is_all:
            part = _NARROW.get(part, part)
        made.append(part)
    return "".join(made)


def _in_list(part: str, table: Mapping[str, str]) -> str:
    """A list of characters with what stands in it replaced."""
    return part[0] + _IN_LIST.sub(lambda one: table.get(one[0], one[0]), part[1:])


def _is_unwritten(text: str) -> bool:
    """Whether a character, as it is escaped, is one that is not written."""
    code = _CODE.fullmatch(text)
    if code is not None:
        return int(code[1], 16) < 128 and UNWRITTEN.match(chr(int(code[1], 16))) is not None
    return text in (r"\a", r"\v") or UNWRITTEN.fullmatch(text) is not None


def _members(characters: str) -> frozenset[str] | None:
    """The characters of ASCII in a list of them; None: it is written in a way of Rust's own."""
    if re.search(r"\[:|\\[pP]", characters):
        return None
    try:
        return frozenset(re.findall(_CODE.sub(lambda one: rf"\U{one[1]:0>8}", characters), _ASCII))
    except (re.error, OverflowError):
        return None
