"""Which branches of a `oneOf` exclude each other: what lets one of them be drawn without looking at the rest.

Two do where they allow other types, where they list other values, or where each has a property (pydantic's
and OpenAPI's discriminator) with other values. All of it is read through `$ref`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, Final
from urllib.parse import quote, unquote

MAX_BRANCHES: Final = 200  # that are compared pair by pair
_HOPS: Final = 50  # from a schema to what is looked for in it
EVERY: Final = frozenset(("string", "integer", "fraction", "boolean", "null", "array", "object"))
_TYPES: Final = {kind: frozenset((kind,)) for kind in EVERY} | {"number": frozenset(("integer", "fraction"))}
_NO_URI: Final = re.compile(r"%(?![0-9A-Fa-f]{2})|[^A-Za-z0-9\-._~!$&'()*+,;=:@/?%]")
_INDEX: Final = re.compile("0|[1-9][0-9]{0,9}")  # in a list; int() refuses thousands of digits
_UNION: Final = ("anyOf", "oneOf")

Values = frozenset[str] | None
"""JSON texts, by which values compare as JSON Schema has it; None: not a few that are listed."""


def as_uri(reference: str) -> str:
    """A `$ref` whose fragment has only the characters that a URI may have: some write others."""
    before, mark, pointer = reference.partition("#")
    return before + mark + _NO_URI.sub(lambda one: quote(one[0], safe="", errors="surrogatepass"), pointer)


def resolve(root: Any, reference: Any) -> Any:
    """What a `$ref` of the form `#/...` points to; None: nothing."""
    if not isinstance(reference, str) or not re.fullmatch("#(/.*)?", reference, re.DOTALL):
        return None
    part = root
    for name in reference.split("/")[1:]:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list):
            part = part[int(key)] if _INDEX.fullmatch(key) and int(key) < len(part) else None
        else:
            part = part.get(key) if isinstance(part, Mapping) else None
    return part


def same(value: Any) -> str:
    """The text of a value: equal for those that are equal as JSON, as 1 and 1.0 are."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return {key: _whole(one) for key, one in value.items()} if isinstance(value, dict) else value


def kind_of(value: Any) -> str:
    """The type of a JSON value; a number is an `integer` or a `fraction`."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "fraction"
    kinds: dict[type, str] = {str: "string", type(None): "null", list: "array", dict: "object"}
    return kinds[type(value)]


class Unions:
    """What the schemas of `root` allow, as far as it is needed to tell the branches of a union apart."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[tuple[int, str], Any] = {}  # schemas may be met again and again
        self._met: list[Any] = []  # they live on, so that no other has the identity of one

    def kinds(self, schema: Any, hops: int = _HOPS) -> frozenset[str]:
        """The types that a schema may allow: at least those that it does."""
        if not isinstance(schema, Mapping) or hops == 0:
            return frozenset() if schema is False else EVERY
        known: frozenset[str] = self._once(schema, "", EVERY, lambda: self._kinds(schema, hops - 1))
        return known

    def _once(self, schema: Any, what: str, itself: Any, find: Callable[[], Any]) -> Any:
        """What `find` does, remembered; `itself`: the value where a schema refers to itself."""
        key = (id(schema), what)
        if key not in self._known:
            self._met.append(schema)
            self._known[key] = itself
            self._known[key] = find()
        return self._known[key]

    def _kinds(self, schema: Mapping[str, Any], hops: int) -> frozenset[str]:
        found = EVERY
        if "type" in schema:
            named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            found &= frozenset().union(*(_TYPES.get(str(one), EVERY) for one in named))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            found &= frozenset(map(kind_of, values))
        if "$ref" in schema:
            found &= self.kinds(resolve(self._root, schema["$ref"]), hops)
        for keyword in ("allOf", *_UNION):
            if each := [self.kinds(one, hops) for one in _list(schema, keyword)]:
                found &= frozenset.intersection(*each) if keyword == "allOf" else frozenset().union(*each)
        return found

    def tags(self, schema: Any, name: str | None, hops: int = _HOPS) -> Values:
        """The values that a schema allows at most; with a `name`, its objects' property of that name."""
        if not isinstance(schema, Mapping) or hops == 0:
            return None
        what = "-" if name is None else f"+{name}"
        known: Values = self._once(schema, what, None, lambda: self._tags(schema, name, hops - 1))
        return known

    def _tags(self, schema: Mapping[str, Any], name: str | None, hops: int) -> Values:
        if name is None and "const" in schema:
            return frozenset((same(schema["const"]),))
        if name is None and isinstance(schema.get("enum"), list):
            return frozenset(map(same, schema["enum"]))
        if name is not None and isinstance(schema.get("properties"), Mapping):
            found = self.tags(schema["properties"].get(name), None, hops)
            if found is not None:
                return found
        for one in (resolve(self._root, schema.get("$ref")), *_list(schema, "allOf")):
            if (found := self.tags(one, name, hops)) is not None:
                return found
        for keyword in _UNION:
            each = [self.tags(one, name, hops) for one in _list(schema, keyword)]
            if each and None not in each:
                return frozenset().union(*filter(None, each))
        return None

    def _names(self, schema: Any, hops: int = _HOPS) -> list[str]:
        """Properties of a schema, or of what it refers to."""
        if not isinstance(schema, Mapping) or hops == 0:
            return []
        own = [*schema["properties"]] if isinstance(schema.get("properties"), Mapping) else []
        first = [one for keyword in ("allOf", *_UNION) for one in _list(schema, keyword)[:1]]
        inner = [resolve(self._root, schema.get("$ref")), *first]

        def find() -> list[str]:
            return [*dict.fromkeys([*own, *(name for one in inner for name in self._names(one, hops - 1))])]

        known: list[str] = self._once(schema, "names", own, find)
        return known

    def told_apart(self, branches: Sequence[Any], discriminator: str | None = None) -> str | None:
        """How the branches of a union exclude each other.

        Args:
            discriminator: the only property that counts.

        Returns:
            "": they do; the name of a property: they do where objects have it; None: they may not.
        """
        values = [self.tags(one, None) for one in branches]
        if discriminator is None and _apart(values):
            return ""
        if len(branches) > MAX_BRANCHES:
            return None
        allowed = [self.kinds(one) for one in branches]
        alike = [
            (one, other)
            for one, other in combinations(range(len(branches)), 2)
            if allowed[one] & allowed[other] and not _apart([values[one], values[other]])
        ]
        if not alike:
            return "" if discriminator is None or len(branches) == 1 else None
        if any(allowed[one] & allowed[other] != {"object"} for one, other in alike):
            return None
        objects = [branches[at] for at in sorted({at for pair in alike for at in pair})]
        names = self._names(objects[0]) if discriminator is None else [discriminator]
        return next((name for name in names if _apart([self.tags(one, name) for one in objects])), None)


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _apart(values: Sequence[Values]) -> bool:
    """Whether all are listed, and no value twice."""
    known = [one for one in values if one is not None]
    return len(known) == len(values) and sum(map(len, known)) == len(frozenset().union(*known))


def require(schema: Any, name: str, root: Any) -> None:
    """Make every object of a schema, or of what it refers to, have the property `name`."""
    waiting, seen = [schema], set()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        inner = [branch for keyword in _UNION for branch in _list(one, keyword)]
        if "$ref" in one:
            inner.append(resolve(root, one["$ref"]))
        if inner and "properties" not in one:
            waiting += inner
        else:
            one["required"] = [*dict.fromkeys([*_list(one, "required"), name])]
