"""How a grammar travels, from the front end to what compiles it: a JSON text, `{"kind": ..., "value": ...}`.

What the JSON grammars allow is narrower than JSON in two ways. Between two tokens of JSON there is one space
or one line break with indentation, never more, so that no answer is endless whitespace. And a character
that needs no escape is never escaped: a key spelled in another way would escape its property's schema.
"""

from __future__ import annotations

import enum
import json
from typing import Any, Final

_WHITESPACE: Final = r"\x20|\r?\n[\x20\x09]{0,32}"
JSON_OPTIONS: Final[Any] = {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": '"\\bfnrt'}
"""For the library that compiles JSON Schemas."""


class GrammarKind(enum.StrEnum):
    """What a grammar is written in."""

    JSON_SCHEMA = "json_schema"  # value: the schema, an object
    LOOSE_SCHEMA = "loose_schema"  # one of which its check leaves out what cannot be enforced
    JSON_OBJECT = "json_object"  # no value: any JSON object; or a schema, which its check makes JSON_SCHEMA
    REGEX = "regex"  # Rust's regular expressions, of the whole answer
    CHOICE = "choice"  # value: a list of texts
    LARK = "lark"  # llguidance's dialect of Lark
    GRAMMAR = "grammar"  # that, or GBNF, as a client wrote it; its check makes LARK of it


def grammar_text(kind: GrammarKind, value: Any = None) -> str:
    """A grammar as it travels to the engine."""
    return json.dumps({"kind": kind, "value": value}, separators=(",", ":"))


def json_rule(schema: dict[str, Any]) -> str:
    """A rule of a Lark grammar: JSON by a schema, as narrow as where the schema is the whole grammar."""
    return "%json " + json.dumps(schema | {"x-guidance": JSON_OPTIONS})
