"""JSON Schemas written like the JSON that they describe, for what no `Field` declares.

A type of Python stands for any value of it (`Any` for all), None for null, a text for itself, `[x]` for a
list of x, a tuple for one of several, a declared `Type` for its own schema. A dict is an object with these
keys: one that ends in `?` may be missing, `*` is any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from servelite.frontend.fields import Schema, nullable

_TYPES: Final = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
}


@dataclass(frozen=True)
class Items:
    """A list in a request, with so many items (`most` None: any number)."""

    item: Any
    least: int
    most: int | None = None

    def schema(self) -> Schema:
        """As a JSON Schema."""
        most = {} if self.most is None else {"maxItems": self.most}
        return asked([self.item]) | {"minItems": self.least} | most


def told(value: Any) -> Schema:
    """The schema of an answer. Objects have no keys but those named."""
    return _schema(value, in_request=False)


def asked(value: Any) -> Schema:
    """The schema of a part of a request, where null is absence: of keys that are not named, too."""
    return _schema(value, in_request=True)


def _schema(value: Any, *, in_request: bool) -> Schema:
    if value is Any:
        return {}
    if value is None:
        return {"type": "null"}
    if isinstance(value, type):
        return {"type": _TYPES[value]}
    if isinstance(value, str):
        return {"const": value}
    if isinstance(value, list):
        return {"type": "array", "items": _schema(value[0], in_request=in_request)}
    if isinstance(value, tuple):
        return {"anyOf": [_schema(one, in_request=in_request) for one in value]}
    if not isinstance(value, dict):
        schema: Schema = value.schema()
        return schema
    properties, required = {}, []
    for name, one in value.items():
        inner, bare = _schema(one, in_request=in_request), name.removesuffix("?")
        if name == bare:
            required.append(name)
        properties[bare] = nullable(inner) if in_request and name != bare else inner
    others = properties.pop("*", {"type": "null"} if in_request else False)
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in required if name != "*"],
        "additionalProperties": others,
    }
