"""Of a schema that need not be enforced in full, what the compiler refuses is left out, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from time import thread_time
from typing import Any

import pytest

from servelite.frontend import loose_schemas
from servelite.frontend.loose_schemas import MAX_TRIES, without_refused


def right(part: Any) -> bool:
    """Refuses a look-ahead in what a schema allows; of its definitions, in those that are referred to."""
    return _right(part, part.get("$defs", {}))


def _right(part: Any, shared: Mapping[str, Any]) -> bool:
    if isinstance(part, list):
        return all(_right(one, shared) for one in part)
    if not isinstance(part, Mapping):
        return True
    if "$ref" in part and not _right(shared[part["$ref"].removeprefix("#/$defs/")], shared):
        return False
    inner = [one for word, one in part.items() if word != "$defs"]
    return "(?=" not in str(part.get("pattern")) and _right(inner, shared)


FAULT = {"type": "string", "pattern": "(?=x)y", "maxLength": 5}
MENDED = {"type": "string", "maxLength": 5}


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        (MENDED, MENDED),
        (FAULT, MENDED),
        (
            {"type": "object", "properties": {"a": FAULT, "b": MENDED}, "required": ["a"]},
            {"type": "object", "properties": {"a": MENDED, "b": MENDED}, "required": ["a"]},
        ),
        ({"type": "array", "items": FAULT, "minItems": 1}, {"type": "array", "items": MENDED, "minItems": 1}),
        ({"anyOf": [FAULT, {"type": "null"}]}, {"anyOf": [MENDED, {"type": "null"}]}),
        ({"$defs": {"F": FAULT}, "$ref": "#/$defs/F"}, {"$defs": {"F": MENDED}, "$ref": "#/$defs/F"}),
    ],
)
def test_what_is_refused_is_left_out_and_no_more(schema: dict[str, Any], kept: dict[str, Any]) -> None:
    assert without_refused(schema, right) == kept


def test_tries_are_bounded() -> None:
    tries = 0

    def compiles(part: Any) -> bool:
        nonlocal tries
        tries += 1
        return right(part)

    schema = {"type": "object", "properties": {f"p{i}": FAULT for i in range(2000)}}
    made = without_refused(schema, compiles)
    assert tries <= MAX_TRIES and right(made)


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loose_schemas, "MAX_SECONDS", 0.05)

    def compiles(part: Any) -> bool:
        began = thread_time()
        while thread_time() < began + 0.02:
            pass
        return right(part)

    began = thread_time()
    made = without_refused({"type": "object", "properties": {f"p{i}": FAULT for i in range(40)}}, compiles)
    assert thread_time() - began < 0.4  # 41 tries and more would be 0.8 s
    assert right(made)
