"""The OpenAPI page says what each field takes: no more than is true, and nothing that is refused by type."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from servelite.frontend.endpoints import ENDPOINTS
from servelite.frontend.fields import Custom, Field, Harmless, JSONObject, Object, TokenBias
from servelite.frontend.grammars import STRUCTURED_OUTPUTS_SCHEMA
from servelite.frontend.shapes import Items, asked, told
from tests.frontend.field_cases import cases

VALIDATOR = jsonschema.Draft202012Validator
ONCE = {(field.name, repr(field.type)): field for fields in ENDPOINTS.values() for field in fields}


@pytest.mark.parametrize("field", ONCE.values(), ids=[name for name, _ in ONCE])
def test_a_fields_schema(field: Field) -> None:
    """What is taken fits; what a declared type refuses does not, and of what a reader refuses, most."""
    schema = field.type.schema()
    VALIDATOR.check_schema(schema)
    validator, refused, missed = VALIDATOR(schema), 0, []
    for case in cases(field):
        if isinstance(case.value, list) and len(case.value) > 100_000:
            continue  # seconds of the validator's
        fits = validator.is_valid(case.value)
        if case.taken:
            assert fits, case
        else:
            refused += 1
            missed += [case] if fits else []
    if isinstance(field.type, Custom) and field.name.startswith("guided_"):
        assert schema in STRUCTURED_OUTPUTS_SCHEMA["properties"].values()
    elif isinstance(field.type, Custom | Object):
        assert len(missed) <= refused / 3, missed
    elif not isinstance(field.type, JSONObject | TokenBias):  # depth and the largest ID no schema can say
        assert not missed
    assert schema or isinstance(field.type, Harmless)


def test_shapes() -> None:
    def fits(schema: Any, *values: Any) -> list[bool]:
        return [VALIDATOR(schema).is_valid(value) for value in values]

    answer = told({"a": int, "b?": (str, None), "c?": [{"x": "one"}]})
    assert fits(answer, {"a": 1}, {"a": 1, "b": None}, {"a": 1, "c": [{"x": "one"}]}) == [True] * 3
    assert fits(answer, {}, {"a": "1"}, {"a": 1, "d": None}, {"a": 1, "c": [{"x": "two"}]}) == [False] * 4
    part = asked({"a": int, "b?": str})
    assert fits(part, {"a": 1, "b": None, "d": None}, {"a": None}, {"a": 1, "d": 1}) == [True, False, False]
    table = told({"*": float})
    assert fits(table, {}, {"x": 1.5}, {"x": "1"}) == [True, True, False]
    assert fits(Items(int, 1, 2).schema(), [], [1], [1, 2, 3]) == [False, True, False]
