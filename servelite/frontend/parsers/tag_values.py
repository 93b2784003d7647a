"""A parameter's text between its tags, as JSON: a string unless the schema says otherwise."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from servelite.frontend.parsers.json_text import dump, escaped
from servelite.frontend.parsers.reader import Emit, Reader, Steps, Truncated
from servelite.frontend.unions import EVERY, Unions, kind_of


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
    emit(converted("".join(parts), value_types(schema, key)))


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


def value_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The types that a parameter may have, by `unions.kind_of`; empty where nothing is said."""
    properties = schema.get("properties")
    one = properties.get(key) if isinstance(properties, Mapping) else None
    kinds = Unions(schema).kinds(one)
    return frozenset() if kinds == EVERY else kinds


def _no_number(name: str) -> Any:
    raise ValueError(name)


def converted(text: str, types: Collection[str]) -> str:
    """`text` as JSON: itself where it is a value of one of the types, else a string."""
    stripped = text.strip()
    if "boolean" in types and stripped in ("True", "False"):
        return stripped.lower()
    if stripped == "None" and ("null" in types or "string" not in types):
        return "null"
    try:
        value = json.loads(stripped, parse_constant=_no_number)
        again = dump(value)
    except (ValueError, RecursionError):
        return dump(text)
    if isinstance(value, str) or ("string" in types and kind_of(value) not in types):
        return dump(text)
    return again
