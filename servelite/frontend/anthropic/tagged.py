"""Objects of several kinds, as Anthropic's bodies have them: a field of theirs (`type`, `role`) tells them
apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import REQUIRED, Field, Harmless, Object, OneOf, Schema, Type, shown

Fields = dict[str, Type]
"""Types of fields by name; a name that ends in `?` may be missing."""
ANY: Final = Harmless()


class Tagged:
    """One of several kinds of objects, read as a dict of that kind's fields."""

    def __init__(self, tag: str, kinds: Mapping[str, Fields]) -> None:
        self._tag = tag
        self._kinds = {
            kind: Object((Field(tag, OneOf((kind,)), REQUIRED, "what it is"), *map(_field, fields.items())))
            for kind, fields in kinds.items()
        }

    def read(self, path: str, value: Any) -> dict[str, Any]:
        """Raises `APIError` (400), for a kind that is not among these too."""
        if not isinstance(value, dict):
            raise bad_request(f"{path} must be an object, not {shown(value)}", path)
        kind, where = value.get(self._tag), f"{path}.{self._tag}"
        if not isinstance(kind, str) or kind not in self._kinds:
            known = ", ".join(self._kinds)
            text = f"{where} is {shown(kind)}, which is not supported here: {known}"
            raise bad_request(text, where, "unsupported_value")
        return self._kinds[kind].read(path, value)

    def describe(self) -> str:
        return f"object with a {self._tag}: {', '.join(self._kinds)}"

    def schema(self) -> Schema:
        return {"anyOf": [kind.schema() for kind in self._kinds.values()]}


def _field(named: tuple[str, Type]) -> Field:
    name, kind = named
    bare = name.removesuffix("?")
    return Field(bare, kind, REQUIRED if bare == name else None, "")
