"""How many expressions one string has to match at once, by `allOf` and `$ref`.

The compiler makes one automaton of them, in time and memory that may double with each: 20 took 3 s and
0.5 GB, 23 more than a minute, in which nothing stops it. What alternatives (`anyOf`, `oneOf`) add is the most
that one of them has; their properties are not held against those beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from servelite.frontend.repetitions import without_schemas
from servelite.frontend.unions import resolve

MAX_EXPRESSIONS: Final = 10

_EXPRESSIONS: Final = ("pattern", "format")
_JOINED: Final = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\n])+/|(?P<joined>&(?!\s*~))', re.DOTALL
)
_HOPS: Final = 50  # of `$ref` and `allOf`, and of properties within each other


def most_expressions(root: Any) -> int:
    """The most `pattern`s and `format`s that hold for one string, about."""
    counts = _Counts(root)
    return max((counts.of((part,)) for part in _joined(root)), default=0)


def joined_in_grammar(text: str) -> int:
    """How many expressions a grammar in Lark joins by `&`, those that it excludes (`& ~`) not counted."""
    joints = sum(found["joined"] is not None for found in _JOINED.finditer(without_schemas(text)))
    return joints + 1 if joints else 0


def _joined(root: Any) -> Iterator[Mapping[str, Any]]:
    """The schemas that others are joined to."""
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += one.values()
            if "allOf" in one or "$ref" in one:
                yield one
        elif isinstance(one, list):
            waiting += one


class _Counts:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[frozenset[int], int] = {}

    def of(self, schemas: Iterable[Any], hops: int = _HOPS) -> int:
        """For a value that all `schemas` hold for."""
        parts = {id(part): part for schema in schemas for part in self._conjunction(schema)}
        key = frozenset(parts)
        if hops == 0 or key in self._known:
            return self._known.get(key, 0)
        self._known[key] = 0  # for what refers to itself
        count, properties = 0, dict[str, list[Any]]()
        for part in parts.values():
            count += sum(word in part for word in _EXPRESSIONS)
            for word in ("anyOf", "oneOf"):
                branches = part.get(word)
                if isinstance(branches, list):
                    count += max((self.of((one,), hops - 1) for one in branches), default=0)
            for name, one in (part.get("properties") or {}).items():
                properties.setdefault(name, []).append(one)
        shared = [self.of(alike, hops - 1) for alike in properties.values() if len(alike) > 1]
        self._known[key] = max([count, *shared])
        return self._known[key]

    def _conjunction(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """A schema and what holds with it."""
        waiting, seen = [schema], set()
        while waiting:
            one = waiting.pop()
            if not isinstance(one, Mapping) or id(one) in seen:
                continue
            seen.add(id(one))
            yield one
            if isinstance(one.get("allOf"), list):
                waiting += one["allOf"]
            if "$ref" in one:
                waiting.append(resolve(self._root, one["$ref"]))
