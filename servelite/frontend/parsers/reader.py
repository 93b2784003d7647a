"""The text of an answer as a parser reads it: generators that wait where the next characters are missing.

A parser looks at characters in their order and never at how many happen to be there, so what it
makes of a text does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A parser's work: it yields to wait for more text, and returns a T."""
Emit = Callable[[str], object]

SPACE: Final = " \t\r\n"
_NON_SPACE: Final = re.compile(r"[^ \t\r\n]")


class NotACall(Exception):
    """The text is not what a call would be."""


class Truncated(Exception):
    """The text ended in the middle of something."""


class Reader:
    """Text that grows.

    Attributes:
        text, at: what is kept of the text, and where the next character to read stands in it.
        ended: no more text comes.
    """

    __slots__ = ("_mark", "at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._mark = -1

    def push(self, text: str) -> None:
        """Append; what lies before the mark (or without one, before `at`) is forgotten."""
        keep = self.at if self._mark < 0 else self._mark
        self.text = self.text[keep:] + text
        self.at -= keep
        if self._mark >= 0:
            self._mark = 0

    def mark(self) -> None:
        """`rewind` comes back to here."""
        self._mark = self.at

    def rewind(self) -> None:
        """Back to the mark, which is taken away; without one, stay."""
        if self._mark >= 0:
            self.at, self._mark = self._mark, -1

    def commit(self) -> None:
        """What was read is used up: no going back."""
        self._mark = -1

    def rest(self) -> str:
        """All that is there, read."""
        text, self.at = self.text[self.at :], len(self.text)
        return text

    def peek(self) -> Steps[str]:
        """The next character; raises `Truncated` at the end."""
        while self.at >= len(self.text):
            if self.ended:
                raise Truncated
            yield
        return self.text[self.at]

    def skip_space(self) -> Steps[str]:
        """The next character that is no white space; what came before it is read."""
        while True:
            found = _NON_SPACE.search(self.text, self.at)
            if found is not None:
                self.at = found.start()
                return found[0]
            self.at = len(self.text)
            if self.ended:
                raise Truncated
            yield

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """The longest run of the characters that `pattern`, a repeated class, matches; may be empty."""
        length = 0  # `at` stays: a caller who does not want the run can go back
        while True:
            found = pattern.match(self.text, self.at + length)
            if found is not None:
                length += len(found[0])
            if self.at + length < len(self.text) or self.ended:
                run = self.text[self.at : self.at + length]
                self.at += length
                return run
            yield

    def begins(self, literal: str) -> Steps[bool]:
        """Whether the text goes on with `literal`; nothing is read."""
        while True:
            if self.text.startswith(literal, self.at):
                return True
            if self.ended or not literal.startswith(self.text[self.at :]):
                return False
            yield

    def optional(self, literal: str, *, lossy: bool = False) -> Steps[bool]:
        """Read `literal` if the text goes on with it, white space before it included.

        Args:
            lossy: where the text ends in the middle of it, that piece is read as well.
        """
        while True:
            found = _NON_SPACE.search(self.text, self.at)
            first = len(self.text) if found is None else found.start()
            if self.text.startswith(literal, first):
                self.at = first + len(literal)
                return True
            if not literal.startswith(self.text[first:]):
                return False
            if self.ended:
                self.at = len(self.text) if lossy else self.at
                return False
            yield

    def expect(self, literal: str) -> Steps[None]:
        """Read `literal`; raises `NotACall` where the text differs, `Truncated` where it ends too soon."""
        for character in literal:
            if (yield from self.peek()) != character:
                raise NotACall
            self.at += 1

    def until(self, stops: tuple[str, ...], emit: Emit, *, lossy: bool = False) -> Steps[str]:
        """Hand on the text up to the first of `stops`, which is read and returned; "" at the end.

        Args:
            stops: none begins with another one.
            lossy: where the text ends in the middle of one, that piece is dropped.
        """
        pattern = stop_pattern(stops)
        while True:
            found = pattern.search(self.text, self.at)
            if found is not None and found[0] in stops:
                if found.start() > self.at:
                    emit(self.text[self.at : found.start()])
                self.at = found.end()
                return found[0]
            safe = len(self.text) if found is None or (self.ended and not lossy) else found.start()
            if safe > self.at:
                emit(self.text[self.at : safe])
                self.at = safe
            if self.ended:
                self.at = len(self.text)
                return ""
            yield


_patterns: dict[tuple[str, ...], re.Pattern[str]] = {}


def stop_pattern(stops: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of `stops`, or a beginning of one at the text's very end. Of constants only: kept."""
    pattern = _patterns.get(stops)
    if pattern is None:
        whole = "|".join(map(re.escape, stops))
        partial = "|".join(_beginning(stop) for stop in stops)
        pattern = _patterns[stops] = re.compile(f"{whole}|(?:{partial})\\Z")
    return pattern


def _beginning(stop: str) -> str:
    """A pattern for every proper beginning of `stop` but the empty one."""
    pattern = ""
    for character in reversed(stop[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern or r"(?!)"
