"""Schemas that need not be enforced in full: what the compiler refuses by its value is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import thread_time
from typing import Any, Final

from servelite.frontend.schema_keywords import with_each

MAX_TRIES: Final = 300  # of one schema: from then on, what may hold a fault is left out whole
MAX_SECONDS: Final = 1.0  # of CPU time for them: other grammars wait for the thread

_SHAPE: Final = ("additionalProperties", "items", "required", "properties", "type")  # the last goes last
_SHARED: Final = ("$defs", "definitions")


def without_refused(schema: Mapping[str, Any], compiles: Callable[[Any], bool]) -> Any:
    """`schema`, or if it does not compile, as much of it as does.

    Args:
        compiles: whether a schema does.
    """
    return _Sieve(schema, compiles).sift(schema, root=True)


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
