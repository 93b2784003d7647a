"""A parameter's text between its tags, as JSON: a string unless the schema says otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from servelite.frontend.parsers.json_text import dump, escaped
from servelite.frontend.parsers.reader import Emit, Reader, Steps, Truncated


def copy_tag_value(
    reader: Reader, emit: Emit, closing: str, schema: Mapping[str, Any], key: str
) -> Steps[None]:
    """Hand on the value up to `closing`, as JSON.

    A string comes as it is written; whatever else is possible is known only when it is whole.

    Args:
        schema: of the call's arguments; `key`'s own is looked up there.
    """
    text = _Unwrapped()
    if value_types(schema, key) == {"string"}:
        emit('"')
        whole = yield from reader.until((closing,), lambda part: emit(escaped(text.add(part))), lossy=True)
        if not whole:
            raise Truncated
        emit('"')
        return
    parts: list[str] = []
    if not (yield from reader.until((closing,), lambda part: parts.append(text.add(part)))):
        raise Truncated
    emit(_converted("".join(parts), value_types(schema, key)))


class _Unwrapped:
    """A text without the line break that it begins with and the one that it ends with."""

    def __init__(self) -> None:
        self._begun = False
        self._held = ""

    def add(self, text: str) -> str:
        """What is now certain."""
        if not self._begun and text:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")


def value_types(schema: Mapping[str, Any], key: str) -> set[str]:
    """The JSON types that a parameter may have; empty where nothing is said."""
    properties = schema.get("properties")
    one = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(one) if isinstance(one, Mapping) else set()


def _types(schema: Mapping[str, Any]) -> set[str]:
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {one for one in named if isinstance(one, str)}
    if isinstance(schema.get("enum"), list):
        return {"string" if isinstance(value, str) else "other" for value in schema["enum"]}
    found: set[str] = set()
    for word in ("anyOf", "oneOf"):
        inner = schema.get(word)
        for one in inner if isinstance(inner, list) else ():
            found |= _types(one) if isinstance(one, Mapping) else set()
    return found


def _converted(text: str, types: set[str]) -> str:
    """`text` as JSON: itself where it is a value of one of the types, else a string."""
    stripped = text.strip()
    if types & {"boolean"} and stripped in ("True", "False"):
        return stripped.lower()
    if stripped == "None" and (types & {"null"} or not types & {"string"}):
        return "null"
    try:
        value = json.loads(stripped)
        again = dump(value)
    except (ValueError, RecursionError):
        return dump(text)
    if isinstance(value, str) or ("string" in types and not _is_one_of(value, types)):
        return dump(text)
    return again


def _is_one_of(value: Any, types: set[str]) -> bool:
    kinds = {bool: "boolean", type(None): "null", dict: "object", list: "array", float: "number"}
    kind = kinds.get(type(value), "integer")
    return kind in types or (kind == "integer" and "number" in types)
