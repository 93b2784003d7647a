"""What of a schema the compiler refuses by its value: named, or left out where it need not be enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from time import thread_time
from typing import Any, Final

from servelite.frontend.schema_keywords import schemas_in, with_each

MAX_TRIES: Final = 300  # of one schema: from then on, what may hold a fault is left out whole
MAX_SECONDS: Final = 1.0  # of CPU time for them, of what a check has

_SHAPE: Final = ("additionalProperties", "items", "required", "properties", "type")  # the last goes last
_SHARED: Final = ("$defs", "definitions")
_ELSEWHERE: Final = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')


def without_refused(schema: Mapping[str, Any], compiles: Callable[[Any], bool]) -> Any:
    """`schema`, or if it does not compile, as much of it as does.

    Args:
        compiles: whether a schema does.
    """
    return _Sieve(schema, compiles).sift(schema, root=True)


def refused_part(schema: Mapping[str, Any], place: str, compiles: Callable[[Any], bool]) -> str:
    """The place of the innermost schema within `schema`, at `place`, that does not compile by itself."""
    if _ELSEWHERE.search(json.dumps(schema)):  # a part alone would miss what it refers to
        return place
    return _Sieve(schema, compiles).find(schema, place)


class _Sieve:
    def __init__(self, root: Mapping[str, Any], compiles: Callable[[Any], bool]) -> None:
        self._shared = {name: dict(root[name]) for name in _SHARED if name in root}
        self._compiles = compiles
        self._tries = 0
        self._end = thread_time() + MAX_SECONDS

    def _right(self, part: Any) -> bool:
        """Whether `part` compiles where it stands."""
        self._tries += 1
        if isinstance(part, bool) or self._tries > MAX_TRIES or thread_time() > self._end:
            return isinstance(part, bool)
        return self._compiles({**part, **self._shared})

    def find(self, part: Mapping[str, Any], at: str) -> str:
        """See `refused_part`."""
        for inner, one in schemas_in(part):
            if thread_time() > self._end:
                break
            if isinstance(one, Mapping) and not self._compiles({**one, **self._shared}):
                return self.find(one, at + inner)
        return at

    def sift(self, part: Any, *, root: bool = False) -> Any:
        """What compiles of `part`: first its own schemas are sifted, then its keywords, its shape last."""
        if self._right(part):
            return part
        if not isinstance(part, Mapping):
            return {}
        if root:
            for shared in self._shared.values():
                shared.update({key: self.sift(one) for key, one in shared.items()})
        kept = {
            word: with_each(word, value, self.sift) for word, value in part.items() if word not in _SHARED
        }
        for word in sorted(kept, key=lambda word: _SHAPE.index(word) if word in _SHAPE else -1):
            if self._right(kept):
                break
            del kept[word]
            if word == "patternProperties":  # which it is no more that speaks of the other keys
                kept.pop("additionalProperties", None)
        return {**kept, **self._shared} if root else kept
