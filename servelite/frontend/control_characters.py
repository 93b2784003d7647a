r"""Control characters that no string of an answer holds, and what the compiler makes of patterns for them.

In strings, five are written: `\b`, `\f`, `\n`, `\r`, `\t`. The others would take `\u`, which would let a key
be spelled in two ways, and the compiler leaves them out of values and patterns without a word. Where a list
of characters has all the five, it adds `"` and the backslash, whether they are in it or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

UNWRITTEN: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

_CHARACTER: Final = re.compile(
    r"\\[xuUpP]\{[^}]{0,50}\}|\\x..|\\u.{4}|\\U.{8}|\\[pP].|\\.|\[\^?\]?|.", re.DOTALL
)
_CODE: Final = re.compile(r"\\[xuU]\{?([0-9A-Fa-f]{1,8})\}?")
_LETTERS: Final = re.compile(r"\\p(?:[LMNZ]|\{[LMNZ][a-z]?\})")  # none is in ASCII's controls, `"` or `\`
_ALL_FIVE: Final = frozenset("\b\t\n\f\r")
_ASCII: Final = "".join(map(chr, range(128)))


def narrowed(pattern: str) -> str | None:
    """A regular expression (Rust's) with lists that the compiler follows rightly; None: it cannot.

    A list that would have been added to is without the backspace, so that fewer texts match.
    """
    made = []
    for part in _parts(pattern):
        members: frozenset[str] | None = frozenset()
        if part.startswith(("[", r"\p", r"\P")):
            members = _members(part)
        if members is None or len(part) < 3 or part[0] != "[":
            if any(_is_unwritten(one[0]) for one in _CHARACTER.finditer(part)):
                return None
        elif len(members) == 1 and UNWRITTEN.match("".join(members)) and part[1] != "^":
            return None
        added = members is None or (members >= _ALL_FIVE and not members >= {'"', "\\"})
        made.append(rf"[{part}--\x08]" if added else part)
    return "".join(made)


def _parts(pattern: str) -> Iterator[str]:
    """Its characters, as they are escaped, and its lists of characters."""
    start = depth = 0
    for one in _CHARACTER.finditer(pattern):
        start = start if depth else one.start()
        depth += one[0].startswith("[") - (one[0] == "]" and depth > 0)
        if not depth:
            yield pattern[start : one.end()]
    if depth:  # the compiler refuses it
        yield pattern[start:]


def _is_unwritten(text: str) -> bool:
    """Whether a character, as it is escaped, is one that is not written."""
    code = _CODE.fullmatch(text)
    if code is not None:
        return int(code[1], 16) < 128 and UNWRITTEN.match(chr(int(code[1], 16))) is not None
    return text in (r"\a", r"\v") or UNWRITTEN.fullmatch(text) is not None


def _members(characters: str) -> frozenset[str] | None:
    """The characters of ASCII in a list of them; None: it is written in a way of Rust's own."""
    known = _LETTERS.sub("a", characters)
    if re.search(r"\[|&&|--|~~|\\", re.sub(r"\\[^pP]", "", known, flags=re.DOTALL)[1:]):
        return None
    try:
        return frozenset(re.findall(_CODE.sub(lambda one: rf"\U{one[1]:0>8}", known), _ASCII))
    except (re.error, OverflowError):
        return None
