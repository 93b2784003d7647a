"""Whether the engine can follow a grammar: it is held against keywords and limits, and compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from llguidance.gbnf_to_lark import any_to_lark

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import shown
from servelite.frontend.grammars import place_of
from servelite.frontend.loose_schemas import refused_part, without_refused
from servelite.frontend.repetitions import MAX_RUN, run_of_expression, run_of_grammar
from servelite.frontend.schema_keywords import enforceable, run_text
from servelite.tokenizer.grammar import GrammarError, Grammars
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text

_BRANCHES_ALIKE: Final = (
    "oneOf is enforced only where its branches exclude each other: by their types, or by a property that "
    "each lists other values of (const, enum); use anyOf"
)
_TOO_MUCH_AT_ONCE: Final = (
    "a pattern (pattern, format) and what else its text must fit (minLength, maxLength, another pattern) are "
    "too large to be enforced together; give smaller bounds"
)
_NO_LOOK_AROUND: Final = "look-around is not supported, nor are ^ and $ within an expression"


_SCHEMAS: Final = (GrammarKind.JSON_SCHEMA, GrammarKind.LOOSE_SCHEMA, GrammarKind.JSON_OBJECT)


def compile_check(
    grammar: str, grammars: Grammars, field: str, unknown: Callable[[str], None] | None = None
) -> str:
    """Hold a grammar against the table of keywords and the limits, and compile it.

    Args:
        unknown: called with the place of each keyword that no standard has; None: it is an error.

    Returns:
        The grammar as the compiler can follow it.

    Raises:
        APIError: 400; names `field`, and the keyword or the reason.
    """
    read = json.loads(grammar)
    kind, value = read["kind"], read.get("value")
    place = at = place_of(field, kind)

    refusals: list[GrammarError] = []

    def compiles(schema: Any) -> bool:
        try:
            grammars.compile(grammar_text(GrammarKind.JSON_SCHEMA, schema))
        except GrammarError as error:
            refusals.append(error)
            return False
        return True

    if kind in _SCHEMAS and value is not None:
        loose = kind == GrammarKind.LOOSE_SCHEMA
        schema = enforceable(value, place, loose=loose, unknown=unknown)
        grammar = grammar_text(
            GrammarKind.JSON_SCHEMA, without_refused(schema, compiles) if loose else schema
        )
    elif kind == GrammarKind.REGEX:
        _check_run(run_of_expression(value), place)
    elif kind == GrammarKind.GRAMMAR:
        lark = _lark(value, place)
        _check_run(run_of_grammar(lark), place)
        grammar = grammar_text(GrammarKind.LARK, lark)
    try:
        grammars.compile(grammar)
    except GrammarError as error:
        refusals.append(error)
        if kind in _SCHEMAS and value is not None:
            at = refused_part(schema, place, compiles)  # the last refusal is that part's
        text = f"{at}: {_in_our_words(str(refusals[-1]))}"
        raise bad_request(text, place, "invalid_grammar") from None
    return grammar


def _lark(text: str, place: str) -> str:
    """Lark as it is, GBNF and its likes (`root ::= ...`) translated."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the translation has no error of its own
        raise bad_request(f"{place} cannot be read: {shown(str(error))}", place, "invalid_grammar") from None


def _check_run(run: int, place: str) -> None:
    if run > MAX_RUN:
        raise bad_request(f"{place} {run_text(run)}", place, "invalid_grammar")


def _in_our_words(error: str) -> str:
    """What the library says, where it speaks of itself."""
    if error.startswith("oneOf constraints"):
        return _BRANCHES_ALIKE
    if "determine if regex is empty" in error:
        return _TOO_MUCH_AT_ONCE
    if "Regex is empty" in error:
        return "no text fits a pattern (pattern, format) and what else is asked of it"
    return error.replace("json-schema:///", "").replace("lookarounds not supported yet", _NO_LOOK_AROUND)
