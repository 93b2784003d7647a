"""What a client may ask an answer to follow, read and checked before the engine hears of it.

Two fields ask for it: OpenAI's `response_format` and vLLM's `structured_outputs`. Reading them is cheap and
gives a grammar as it travels; `GrammarCheck.check`, in a thread, holds it against the table of keywords and
compiles it as the engine will, so that what is wrong is a 400 before any stream opens.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any, Final

from llguidance.gbnf_to_lark import any_to_lark

from servelite.frontend.errors import APIError, bad_request
from servelite.frontend.fields import OneOf, String, Strings, check_names, shown
from servelite.frontend.intersections import MAX_EXPRESSIONS, joined_in_grammar, most_expressions
from servelite.frontend.loose_schemas import without_refused
from servelite.frontend.repetitions import MAX_RUN, run_of_expression, run_of_grammar
from servelite.frontend.schema_keywords import enforceable, run_text
from servelite.frontend.shapes import Items, asked
from servelite.tokenizer.grammar import GrammarError, GrammarKind, Grammars, grammar_text
from servelite.tokenizer.tokenizer import Tokenizer

MAX_SCHEMA_CHARS: Final = 256 << 10  # of its JSON
MAX_GRAMMAR_CHARS: Final = 64 << 10
MAX_REGEX_CHARS: Final = 16 << 10
MAX_CHOICES: Final = 4096
MAX_CHOICE_CHARS: Final = 1024
MAX_NAME_CHARS: Final = 64  # OpenAI's
CHECK_SECONDS: Final = 10.0  # until a check is given up, and its request refused

RESPONSE_FORMAT_SCHEMA: Final = asked(
    (
        {"type": OneOf(("text", "json_object"))},
        {
            "type": "json_schema",
            "json_schema": {
                "name": String(MAX_NAME_CHARS),
                "schema": dict,
                "strict?": bool,
                "description?": String(1 << 16),
            },
        },
    )
)
STRUCTURED_OUTPUTS_SCHEMA: Final = asked(
    {
        "json?": (dict, String(MAX_SCHEMA_CHARS)),
        "regex?": String(MAX_REGEX_CHARS),
        "choice?": Items(String(MAX_CHOICE_CHARS), 1, MAX_CHOICES),
        "grammar?": String(MAX_GRAMMAR_CHARS),
    }
)

_CHECKED: Final = 256  # grammars whose check is remembered

_SCHEMA_PLACES: Final = {"response_format": ".json_schema.schema", "structured_outputs": ".json"}

_BRANCHES_ALIKE: Final = (
    "oneOf is enforced only where its branches exclude each other: by their types, or by a property that "
    "each lists other values of (const, enum); use anyOf"
)
_TOO_MUCH_AT_ONCE: Final = (
    "a pattern (pattern, format) and what else its text must fit (minLength, maxLength, another pattern) are "
    "too large to be enforced together; give smaller bounds"
)
_NO_LOOK_AROUND: Final = "look-around is not supported, nor are ^ and $ within an expression"

# What a client's own grammar may not hold: each would be ignored, or slip through the table of keywords.
_NOT_IN_GRAMMARS: Final = ("%json", "%lark", "x-guidance", "temperature=")


def read_response_format(path: str, value: Any) -> str:
    """OpenAI's `response_format` as a grammar, "" for plain text; raises `APIError` (400)."""
    if not isinstance(value, dict):
        raise bad_request(f"{path} must be an object with a type, not {shown(value)}", path)
    kind = value.get("type")
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    check_names(path, value, known)
    if kind == "text":
        return ""
    if kind == "json_object":
        return grammar_text(GrammarKind.JSON_OBJECT)
    if kind == "json_schema":
        return _read_json_schema(f"{path}.json_schema", value.get("json_schema"))
    raise bad_request(
        f"{path}.type is {shown(kind)}; it must be text, json_object or json_schema", f"{path}.type"
    )


def _read_json_schema(path: str, value: Any) -> str:
    if not isinstance(value, dict):
        raise bad_request(
            f"{path} must be an object with a name and a schema, not {shown(value)}", path, "missing_field"
        )
    check_names(path, value, {"name", "schema", "strict", "description"})
    name, strict, description = value.get("name"), value.get("strict"), value.get("description")
    String(MAX_NAME_CHARS).read(f"{path}.name", name)
    if not name:
        raise bad_request(f"{path}.name is empty", f"{path}.name")
    if description is not None:
        String(1 << 16).read(f"{path}.description", description)
    if strict is not None and not isinstance(strict, bool):
        raise bad_request(f"{path}.strict must be true or false, not {shown(strict)}", f"{path}.strict")
    return _schema_grammar(f"{path}.schema", value.get("schema"))


def read_structured_outputs(path: str, value: Any) -> str:
    """vLLM's `structured_outputs` as a grammar; raises `APIError` (400)."""
    if not isinstance(value, dict):
        raise bad_request(f"{path} must be an object, not {shown(value)}", path)
    kinds = ("json", "regex", "choice", "grammar")
    check_names(path, value, set(kinds))
    given = [kind for kind in kinds if value.get(kind) is not None]
    if len(given) != 1:
        text = f"{path} has {' and '.join(given) or 'none'} of {', '.join(kinds)}; it must have exactly one"
        raise bad_request(text, path)
    kind, at, inner = given[0], f"{path}.{given[0]}", value[given[0]]
    if kind == "json":
        return _schema_grammar(at, _decoded(at, inner))
    if kind == "regex":
        return grammar_text(GrammarKind.REGEX, String(MAX_REGEX_CHARS).read(at, inner))
    if kind == "choice":
        if not isinstance(inner, list | tuple) or not inner:
            raise bad_request(f"{at} must be a list of strings, not {shown(inner)}", at)
        return grammar_text(GrammarKind.CHOICE, Strings(MAX_CHOICES, MAX_CHOICE_CHARS).read(at, inner))
    return grammar_text(GrammarKind.LARK, _read_grammar(at, inner))


def _read_grammar(path: str, value: Any) -> str:
    """Lark as it is, GBNF and its likes (`root ::= ...`) translated."""
    text = String(MAX_GRAMMAR_CHARS).read(path, value)
    for word in _NOT_IN_GRAMMARS:
        if word in text.replace(" ", ""):
            raise bad_request(f"{path} holds {word}, which is not accepted in a grammar", path)
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the translation has no error of its own
        raise bad_request(f"{path} cannot be read: {shown(str(error))}", path, "invalid_grammar") from None


def _schema_grammar(path: str, schema: Any) -> str:
    if not isinstance(schema, dict):
        raise bad_request(f"{path} must be a JSON Schema, an object, not {shown(schema)}", path)
    try:
        text = grammar_text(GrammarKind.JSON_SCHEMA, schema)
    except RecursionError:
        raise bad_request(f"{path} is nested too deep", path) from None
    if len(text) > MAX_SCHEMA_CHARS:
        raise bad_request(f"{path} has {len(text)} characters; the limit is {MAX_SCHEMA_CHARS}", path)
    return text


def _decoded(path: str, value: Any) -> Any:
    """A schema that is given as a text, as an object."""
    if not isinstance(value, str):
        return value
    text = String(MAX_SCHEMA_CHARS).read(path, value)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{path} is no JSON: {error}", path) from None


class GrammarCheck:
    """Checks grammars against one vocabulary, in threads; those that were right lately are remembered, as the
    engine is to follow them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None
        self._right: OrderedDict[tuple[str, bool], str] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str, field: str, loose: bool = False) -> str:
        """A grammar as the engine can follow it; raises `APIError` (400), naming `field`, where it cannot.

        Args:
            loose: it is a schema, of which may be left out what cannot be enforced.
        """
        asked = (grammar, loose)
        with self._lock:
            if asked in self._right:
                self._right.move_to_end(asked)
                return self._right[asked]
            if self._grammars is None:
                try:
                    self._grammars = Grammars(self._tokenizer, to_check=True)
                except GrammarError as error:
                    raise bad_request(f"{field} is not supported: {error}", field) from None
        made = compile_check(grammar, self._grammars, field, loose)
        with self._lock:
            self._right[asked] = made
            if len(self._right) > _CHECKED:
                self._right.popitem(last=False)
        return made


def compile_check(grammar: str, grammars: Grammars, field: str, loose: bool = False) -> str:
    """Hold a grammar against the table of keywords and the limits, and compile it.

    Args:
        loose: as in `GrammarCheck.check`.

    Returns:
        The grammar as the compiler can follow it.

    Raises:
        APIError: 400; names `field`, and the keyword or the reason.
    """
    read = json.loads(grammar)
    kind, value, place = read["kind"], read.get("value"), field

    def compiles(schema: Any) -> bool:
        try:
            grammars.compile(grammar_text(GrammarKind.JSON_SCHEMA, schema))
        except GrammarError:
            return False
        return True

    if kind == GrammarKind.JSON_SCHEMA:
        place += _SCHEMA_PLACES.get(field, "")
        schema = enforceable(value, place, loose=loose)
        _check_joined(most_expressions(schema), place)
        grammar = grammar_text(
            GrammarKind.JSON_SCHEMA, without_refused(schema, compiles) if loose else schema
        )
    elif kind in (GrammarKind.REGEX, GrammarKind.LARK):
        _check_joined(joined_in_grammar(value) if kind == GrammarKind.LARK else 0, place)
        run = run_of_expression(value) if kind == GrammarKind.REGEX else run_of_grammar(value)
        if run > MAX_RUN:
            raise bad_request(f"{place} {run_text(run)}", place, "invalid_grammar")
    try:
        grammars.compile(grammar)
    except GrammarError as error:
        raise bad_request(f"{place}: {_in_our_words(str(error))}", place, "invalid_grammar") from None
    return grammar


def _check_joined(count: int, place: str) -> None:
    if count > MAX_EXPRESSIONS:
        text = f"{place} has {count} expressions that one text must match; the limit is {MAX_EXPRESSIONS}"
        raise bad_request(text, place, "invalid_grammar")


def _in_our_words(error: str) -> str:
    """What the library says, where it speaks of itself."""
    if error.startswith("oneOf constraints"):
        return _BRANCHES_ALIKE
    if "determine if regex is empty" in error:
        return _TOO_MUCH_AT_ONCE
    if "Regex is empty" in error:
        return "no text fits a pattern (pattern, format) and what else is asked of it"
    return error.replace("json-schema:///", "").replace("lookarounds not supported yet", _NO_LOOK_AROUND)


def too_slow(field: str) -> APIError:
    """The 400 for a grammar whose check takes too long."""
    text = f"{field} takes more than {CHECK_SECONDS:g} s to compile; give a smaller one"
    return bad_request(text, field, "invalid_grammar")
