"""Bounds on a chat template's run: turns of its loops, processor time, length of its text.

A template is a program that comes with a model and works on what users send. It runs in a thread that
nothing can interrupt, so it watches itself: each loop's body begins with a call of `Budget.turn`, and
the operators that can make a huge value of small ones look at its size first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS: Final = 2.0  # of the thread's processor time: a busy machine blames no template
MAX_TURNS: Final = 5_000_000
MAX_CHARS: Final = 1 << 25
TURN_NAME: Final = "servelite_turn"
"""The variable under which a compiled template finds `Budget.turn`."""

_LOOK_EVERY: Final = 256
_WIDE: Final = re.compile(r"%[^%a-zA-Z]*(\*|\d{5})")


class TemplateLimit(Exception):
    """A template that does not come to an end; the text says which bound it met."""


class Budget:
    """What one run may use up."""

    def __init__(self) -> None:
        self._turns = 0
        self._deadline = time.thread_time() + MAX_SECONDS

    def turn(self) -> None:
        """Called at the beginning of each turn of each loop."""
        self._turns += 1
        if self._turns % _LOOK_EVERY == 0:
            self._check_time()
        if self._turns > MAX_TURNS:
            raise TemplateLimit(f"its loops take more than {MAX_TURNS} turns")

    def collect(self, pieces: Iterable[str]) -> str:
        """The text of a template's pieces."""
        parts, size = [], 0
        for piece in pieces:
            parts.append(piece)
            size += len(piece)
            if size > MAX_CHARS:
                raise TemplateLimit(f"it writes more than {MAX_CHARS} characters")
            self._check_time()
        return "".join(parts)

    def _check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise TemplateLimit(f"it runs for more than {MAX_SECONDS:g} s")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, whose templates watch a budget."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, and begin the body of each loop with a call of the budget."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            call = nodes.Call(nodes.Name(TURN_NAME, "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
        return tree

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Operators that can make much of little: repetition, powers, padding by a format."""
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    _check_size(len(sequence) * count)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateLimit("it formats to a width of more than four digits")
        return super().call_binop(context, operator, left, right)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise TemplateLimit(f"it makes a value of more than {MAX_CHARS} items")
