"""How one request field is declared: its type and bounds, default and meaning.

A declaration parses and validates the field (`Field.read`) and describes it (`field_table`, and for the
OpenAPI page `Type.schema`), so that the check and the documentation cannot differ. null means absent, as in
OpenAI's API.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from servelite.frontend.errors import APIError, bad_request

SHOWN: Final = 60  # characters of a bad value that an error repeats
MAX_NAME: Final = 64  # characters of a bad name that it repeats
MAX_TOKEN_ID: Final = (1 << 31) - 1


Schema = dict[str, Any]
"""A JSON Schema (2020-12)."""


class Type(Protocol):
    """A field's type with its bounds."""

    def read(self, path: str, value: Any) -> Any:
        """The parsed value; raises `APIError` (400) naming `path`, the value and the limit."""
        ...

    def describe(self) -> str:
        """In words, for the table of fields."""
        ...

    def schema(self) -> Schema:
        """As a JSON Schema: whatever `read` takes fits it, and what does not fit `read` refuses."""
        ...


@dataclass(frozen=True)
class Field:
    """One field of a request body."""

    name: str
    type: Type
    default: Any
    meaning: str

    def read(self, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
        """This field's value in `body`, or its default, which `defaults` may replace."""
        value = body.get(self.name)
        if value is None:
            return defaults.get(self.name, self.default)
        return self.type.read(self.name, value)


class Required:
    """The default of a field that has none."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = Required()


NO_DEFAULTS: Final[Mapping[str, Any]] = {}


_short: Final = reprlib.Repr()
"""Of containers: looks at a few items and levels only, whatever the size."""
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict, _short.maxstring = 3, 8, 8, 8, SHOWN


def refuse_unknown(path: str) -> None:
    """What becomes of a field that is not declared: a 400."""
    raise bad_request(f"Unknown field {path}", path, "unknown_field")


_told_of: Final[ContextVar[Callable[[str], None]]] = ContextVar("told_of", default=refuse_unknown)
"""The `unknown` of the `read_fields` under way: an argument of every reader, which none has to pass on."""


def unknown_field(path: str) -> None:
    """Raises `APIError` (400) for a field that is not known; returns where it is to be passed over."""
    _told_of.get()(path)


def unsupported_kind(path: str, kind: Any, advice: str) -> None:
    """Raises `APIError` (400) for a kind that there is not; returns where it is to be passed over."""
    try:
        unknown_field(f"{path}={str(kind)[:MAX_NAME]}")
    except APIError:
        raise bad_request(
            f"{path} is {shown(kind)}, which is not supported: {advice}", path, "unsupported_value"
        ) from None


def read_object(
    path: str, value: Any, known: Collection[str], required: Collection[str] = ()
) -> dict[str, Any]:
    """The fields of an object that are known and given: null is absence.

    Raises:
        APIError: 400; it is no object, has an unknown field, or lacks a required one.
    """
    if not isinstance(value, dict):
        raise bad_request(f"{path} must be an object, not {shown(value)}", path)
    given = {name: one for name, one in value.items() if one is not None}
    for name in [name for name in given if name not in known]:
        unknown_field(f"{path}.{name[:MAX_NAME]}")
        del given[name]
    for name in required:
        if name not in given:
            raise bad_request(f"{path}.{name} is missing", f"{path}.{name}", "missing_field")
    return given


def check_names(path: str, value: Mapping[str, Any], known: Collection[str]) -> None:
    """Calls `unknown_field` for each field of the object at `path` that is not known; null is absence."""
    read_object(path, value, known)


def shown(value: Any) -> str:
    """`value` as an error repeats it, shortened."""
    if value is None or isinstance(value, bool):
        return _json(value)
    if isinstance(value, str):
        value = value[: SHOWN + 1]
    text = _short.repr(value) if isinstance(value, (list, tuple, dict)) else repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


@dataclass(frozen=True)
class Integer:
    """A whole number; a float without a fraction passes, a boolean does not."""

    low: int
    high: int

    def read(self, path: str, value: Any) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise bad_request(f"{path} must be an integer, not {shown(value)}", path)
        if not self.low <= value <= self.high:
            raise bad_request(
                f"{path} is {shown(value)}; it must be between {self.low} and {self.high}", path
            )
        return int(value)

    def describe(self) -> str:
        return f"integer, {self.low} to {self.high}"

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Number:
    """A finite number."""

    low: float
    high: float
    above_low: bool = False  # the low end itself is excluded

    def read(self, path: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise bad_request(f"{path} must be a number, not {shown(value)}", path)
        if not self.low <= value <= self.high or (self.above_low and value == self.low):
            least = "above" if self.above_low else "at least"
            raise bad_request(
                f"{path} is {shown(value)}; it must be {least} {self.low:g} and at most {self.high:g}", path
            )
        return float(value)

    def describe(self) -> str:
        return f"number, {'above ' if self.above_low else ''}{self.low:g} to {self.high:g}"

    def schema(self) -> Schema:
        low = "exclusiveMinimum" if self.above_low else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high}


@dataclass(frozen=True)
class Boolean:
    """true or false."""

    def read(self, path: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise bad_request(f"{path} must be true or false, not {shown(value)}", path)
        return value

    def describe(self) -> str:
        return "boolean"

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True)
class String:
    """Text of bounded length."""

    max_chars: int

    def read(self, path: str, value: Any) -> str:
        if not isinstance(value, str):
            raise bad_request(f"{path} must be a string, not {shown(value)}", path)
        if len(value) > self.max_chars:
            raise bad_request(f"{path} has {len(value)} characters; the limit is {self.max_chars}", path)
        return value

    def describe(self) -> str:
        return f"string, at most {self.max_chars} characters"

    def schema(self) -> Schema:
        return {"type": "string", "maxLength": self.max_chars}


@dataclass(frozen=True)
class Strings:
    """A string or a list of them, read as a tuple. None of them is empty."""

    max_items: int
    max_chars: int

    def read(self, path: str, value: Any) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise bad_request(f"{path} must be a string or a list of strings, not {shown(value)}", path)
        if len(items) > self.max_items:
            raise bad_request(f"{path} has {len(items)} strings; the limit is {self.max_items}", path)
        texts = tuple(String(self.max_chars).read(f"{path}[{i}]", item) for i, item in enumerate(items))
        if "" in texts:
            raise bad_request(f"{path} holds an empty string", path)
        return texts

    def describe(self) -> str:
        return f"string or list of at most {self.max_items}, {self.max_chars} characters each"

    def schema(self) -> Schema:
        text = {"type": "string", "minLength": 1, "maxLength": self.max_chars}
        return {"anyOf": [text, {"type": "array", "items": text, "maxItems": self.max_items}]}


@dataclass(frozen=True)
class TokenIDs:
    """A list of token IDs, read as a tuple. Whether the vocabulary has them is known later."""

    max_items: int
    least: int = 0  # items

    def read(self, path: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise bad_request(f"{path} must be a list of token IDs, not {shown(value)}", path)
        if not self.least <= len(value) <= self.max_items:
            raise bad_request(
                f"{path} has {len(value)} token IDs; it must have {self.least} to {self.max_items}", path
            )
        ids = Integer(0, MAX_TOKEN_ID)
        return tuple(ids.read(f"{path}[{i}]", item) for i, item in enumerate(value))

    def describe(self) -> str:
        return f"list of {self.least} to {self.max_items} token IDs"

    def schema(self) -> Schema:
        ids = Integer(0, MAX_TOKEN_ID).schema()
        return {"type": "array", "items": ids, "minItems": self.least, "maxItems": self.max_items}


@dataclass(frozen=True)
class TokenBias:
    """An object of token IDs and numbers, read as a tuple of pairs, ascending."""

    max_items: int
    low: float
    high: float

    def read(self, path: str, value: Any) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            raise bad_request(f"{path} must be an object of token IDs and numbers, not {shown(value)}", path)
        if len(value) > self.max_items:
            raise bad_request(f"{path} has {len(value)} tokens; the limit is {self.max_items}", path)
        number = Number(self.low, self.high)
        pairs: dict[int, float] = {}
        for key, bias in value.items():
            index = _token_id(key)
            if index is None:
                raise bad_request(f"{path} has the key {shown(key)}, which is no token ID", path)
            pairs[index] = number.read(f"{path}.{index}", bias)
        return tuple(sorted(pairs.items()))

    def describe(self) -> str:
        return f"object, token ID to {self.low:g} to {self.high:g}, at most {self.max_items}"

    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": f"^[0-9]{{1,{len(str(MAX_TOKEN_ID))}}}$"},
            "additionalProperties": Number(self.low, self.high).schema(),
            "maxProperties": self.max_items,
        }


@dataclass(frozen=True)
class JSONObject:
    """Any JSON object, its nesting bounded."""

    max_depth: int

    def read(self, path: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise bad_request(f"{path} must be an object, not {shown(value)}", path)
        level: list[Any] = [value]
        for _ in range(self.max_depth):
            level = [inner for one in level for inner in _inner(one)]
            if not level:
                return value
        raise bad_request(f"{path} is nested deeper than {self.max_depth} levels", path)

    def describe(self) -> str:
        return f"object, nested at most {self.max_depth} deep"

    def schema(self) -> Schema:
        return {"type": "object"}


def _inner(value: Any) -> list[Any]:
    """The containers directly inside a container."""
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, (dict, list, tuple))]


def _token_id(key: Any) -> int | None:
    """A JSON object's key (or Python's integer) as a token ID."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= len(str(MAX_TOKEN_ID)):
        key = int(key)
    return key if type(key) is int and 0 <= key <= MAX_TOKEN_ID else None


@dataclass(frozen=True)
class Object:
    """A JSON object with fields of its own, read as a dict of all of them."""

    fields: tuple[Field, ...]

    def read(self, path: str, value: Any) -> dict[str, Any]:
        required = [f.name for f in self.fields if f.default is REQUIRED]
        given = read_object(path, value, [f.name for f in self.fields], required)
        return {
            f.name: f.type.read(f"{path}.{f.name}", given[f.name]) if f.name in given else f.default
            for f in self.fields
        }

    def describe(self) -> str:
        return "object with " + ", ".join(f.name for f in self.fields)

    def schema(self) -> Schema:
        return object_schema(self.fields)


@dataclass(frozen=True)
class Harmless:
    """Accepted whatever it holds, because it asks nothing of the answer."""

    def read(self, path: str, value: Any) -> None:
        return None

    def describe(self) -> str:
        return "anything"

    def schema(self) -> Schema:
        return {}


@dataclass(frozen=True)
class Only:
    """A field of OpenAI's API of which only these values are supported yet; all mean its default."""

    values: tuple[Any, ...]

    def read(self, path: str, value: Any) -> None:
        # `type` too: in Python, True == 1 == 1.0, in JSON they differ (1 and 1.0 do not).
        if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self.values):
            allowed = ", ".join(_json(v) for v in self.values)
            rest = f"only {allowed} is" if allowed else "it is not"
            raise bad_request(
                f"{path} is {shown(value)}, which is not supported: {rest} accepted",
                path,
                "unsupported_value",
            )

    def describe(self) -> str:
        return "only " + ", ".join(_json(v) for v in self.values) if self.values else "not supported"

    def schema(self) -> Schema:
        return {"enum": list(self.values)}


@dataclass(frozen=True)
class OneOf:
    """One of several words."""

    values: tuple[str, ...]

    def read(self, path: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise bad_request(f"{path} is {shown(value)}; it must be one of: {', '.join(self.values)}", path)
        return value

    def describe(self) -> str:
        return "one of " + ", ".join(f"`{value}`" for value in self.values)

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.values)}


@dataclass(frozen=True)
class Refused:
    """A field that cannot be served; `reason`: why not, or what to send instead."""

    reason: str
    code: str = "unsupported_value"

    def read(self, path: str, value: Any) -> None:
        raise bad_request(f"{path} is not supported: {self.reason}", path, self.code)

    def describe(self) -> str:
        return f"not supported: {self.reason}"

    def schema(self) -> Schema:
        return {"type": "null"}


@dataclass(frozen=True)
class Custom:
    """A field with a reader of its own."""

    reader: Callable[[str, Any], Any]
    words: str
    accepts: Schema = field(default_factory=dict)

    def read(self, path: str, value: Any) -> Any:
        return self.reader(path, value)

    def describe(self) -> str:
        return self.words

    def schema(self) -> Schema:
        return self.accepts


def read_fields(
    fields: Sequence[Field],
    body: Any,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    unknown: Callable[[str], None] = refuse_unknown,
) -> dict[str, Any]:
    """All fields' values in a request body, by name.

    Args:
        defaults: values, already read, that replace the declared defaults.
        unknown: called with the path of each field, at whatever depth, that is not declared.

    Raises:
        APIError: 400; the body is no object, has an unknown field, lacks a required one, or holds a
            value that is out of its bounds.
    """
    if not isinstance(body, dict):
        raise bad_request(f"The request body must be a JSON object, not {shown(body)}")
    known = {f.name for f in fields}
    bound = _told_of.set(unknown)
    try:
        for name in body:
            if name not in known and body[name] is not None:  # null asks for nothing
                unknown_field(name[:MAX_NAME])
        values = {f.name: f.read(body, defaults) for f in fields}
    finally:
        _told_of.reset(bound)
    for name, value in values.items():
        if value is REQUIRED:
            raise bad_request(f"You must provide the field {name}", name, "missing_field")
    return values


def object_schema(fields: Sequence[Field], defaults: Mapping[str, Any] = NO_DEFAULTS) -> Schema:
    """The schema of an object with these fields: null is absence, of other names too.

    Args:
        defaults: values that replace the declared defaults.
    """
    properties = {}
    for f in fields:
        schema, default = f.type.schema(), defaults.get(f.name, f.default)
        given = {} if default in (REQUIRED, None, (), "") else {"default": default}
        told = {"description": f.meaning} if f.meaning else {}
        schema = schema if f.default is REQUIRED else nullable(schema)
        properties[f.name] = schema | told | given
    return {
        "type": "object",
        "properties": properties,
        "required": [f.name for f in fields if f.default is REQUIRED],
        "additionalProperties": {"type": "null"},
    }


def nullable(schema: Schema) -> Schema:
    """What fits a schema, or null."""
    if isinstance(kind := schema.get("type"), str) and "enum" not in schema:
        return schema | {"type": list(dict.fromkeys([kind, "null"]))}
    return {"anyOf": [schema, {"type": "null"}]} if schema else {}


def field_table(fields: Sequence[Field]) -> str:
    """The docs' Markdown table of a request's fields."""
    rows = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for f in fields:
        default = "" if f.default in (None, (), "") else f"`{_json(f.default)}`"
        rows.append(f"| `{f.name}` | {f.type.describe()} | {default} | {f.meaning} |")
    return "\n".join(rows) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, default=repr)
