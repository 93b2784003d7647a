"""What a client may ask an answer to follow, read and checked before the engine hears of it.

Two fields ask for it: OpenAI's `response_format` and vLLM's `structured_outputs`. Reading them is cheap and
gives a grammar as it travels; `GrammarChecker.check` then holds it against the table of keywords and compiles
it as the engine will, so that what is wrong is a 400 before any stream opens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import Custom, Field, String, Strings, check_names, shown
from servelite.frontend.shapes import Items, asked
from servelite.tokenizer.grammar_text import GrammarKind, grammar_text

MAX_SCHEMA_CHARS: Final = 256 << 10  # of its JSON
MAX_GRAMMAR_CHARS: Final = 64 << 10
MAX_REGEX_CHARS: Final = 16 << 10
MAX_CHOICES: Final = 4096
MAX_CHOICE_CHARS: Final = 1024
MAX_NAME_CHARS: Final = 64  # OpenAI's

RESPONSE_FORMAT_SCHEMA: Final = asked(
    (
        {"type": "text"},
        {"type": "json_object", "schema?": dict},
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

_PLACES: Final[Mapping[tuple[str, str], str]] = {
    ("response_format", GrammarKind.JSON_SCHEMA): ".json_schema.schema",
    ("response_format", GrammarKind.LOOSE_SCHEMA): ".json_schema.schema",
    ("response_format", GrammarKind.JSON_OBJECT): ".schema",
    ("structured_outputs", GrammarKind.JSON_SCHEMA): ".json",
    ("structured_outputs", GrammarKind.REGEX): ".regex",
    ("structured_outputs", GrammarKind.CHOICE): ".choice",
    ("structured_outputs", GrammarKind.GRAMMAR): ".grammar",
}

# What a client's own grammar may not hold: each would be ignored, or slip through the table of keywords.
_NOT_IN_GRAMMARS: Final = ("%json", "%lark", "x-guidance", "temperature=")


def place_of(field: str, kind: str) -> str:
    """Where in the field `field` a grammar of that kind stands."""
    return field + _PLACES.get((field, kind), "")


def read_response_format(path: str, value: Any) -> str:
    """OpenAI's `response_format` as a grammar, "" for plain text; raises `APIError` (400)."""
    if not isinstance(value, dict):
        raise bad_request(f"{path} must be an object with a type, not {shown(value)}", path)
    kind = value.get("type")
    beside = {"json_schema": "json_schema", "json_object": "schema"}
    check_names(path, value, {"type", beside.get(str(kind), "type")})
    if kind == "text":
        return ""
    if kind == "json_object":
        if value.get("schema") is None:
            return grammar_text(GrammarKind.JSON_OBJECT)
        return _schema_grammar(f"{path}.schema", value["schema"], GrammarKind.JSON_OBJECT)
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
    kind = GrammarKind.LOOSE_SCHEMA if strict is False else GrammarKind.JSON_SCHEMA
    return _schema_grammar(f"{path}.schema", value.get("schema"), kind)


def read_structured_outputs(path: str, value: Any) -> str:
    """vLLM's `structured_outputs` as a grammar; raises `APIError` (400)."""
    if not isinstance(value, dict):
        raise bad_request(f"{path} must be an object, not {shown(value)}", path)
    check_names(path, value, _READERS.keys())
    given = [kind for kind in _READERS if value.get(kind) is not None]
    if len(given) != 1:
        text = (
            f"{path} has {' and '.join(given) or 'none'} of {', '.join(_READERS)}; it must have exactly one"
        )
        raise bad_request(text, path)
    return _READERS[given[0]](f"{path}.{given[0]}", value[given[0]])


def _read_json(path: str, value: Any) -> str:
    return _schema_grammar(path, _decoded(path, value))


def _read_regex(path: str, value: Any) -> str:
    return grammar_text(GrammarKind.REGEX, String(MAX_REGEX_CHARS).read(path, value))


def _read_choice(path: str, value: Any) -> str:
    if not isinstance(value, list | tuple) or not value:
        raise bad_request(f"{path} must be a list of strings, not {shown(value)}", path)
    return grammar_text(GrammarKind.CHOICE, Strings(MAX_CHOICES, MAX_CHOICE_CHARS).read(path, value))


def _read_grammar(path: str, value: Any) -> str:
    text = String(MAX_GRAMMAR_CHARS).read(path, value)
    for word in _NOT_IN_GRAMMARS:
        if word in "".join(text.split()):
            raise bad_request(f"{path} holds {word}, which is not accepted in a grammar", path)
    return grammar_text(GrammarKind.GRAMMAR, text)


_READERS: Final = {
    "json": _read_json,
    "regex": _read_regex,
    "choice": _read_choice,
    "grammar": _read_grammar,
}
GUIDED_FIELDS: Final = tuple(
    Field(
        f"guided_{kind}",
        Custom(reader, f"as `structured_outputs.{kind}`", STRUCTURED_OUTPUTS_SCHEMA["properties"][kind]),
        None,
        "vLLM's older name of that",
    )
    for kind, reader in _READERS.items()
)


def _schema_grammar(path: str, schema: Any, kind: GrammarKind = GrammarKind.JSON_SCHEMA) -> str:
    if not isinstance(schema, dict):
        raise bad_request(f"{path} must be a JSON Schema, an object, not {shown(schema)}", path)
    try:
        text = grammar_text(kind, schema)
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
