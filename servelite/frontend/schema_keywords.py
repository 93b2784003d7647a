"""Which keywords of JSON Schema (2020-12 to 6) an answer's grammar enforces, and a check for all others.

A keyword that would be ignored is refused by its name and place. What the grammar compiler itself refuses (a
look-around in a `pattern`, `oneOf` whose branches overlap) it says when it compiles.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from servelite.frontend.errors import APIError, bad_request
from servelite.frontend.fields import shown


class Holds(enum.Enum):
    """What a keyword's value holds."""

    VALUE = enum.auto()  # no schema
    SCHEMA = enum.auto()
    SCHEMAS = enum.auto()  # a list of them
    ONE_OR_MORE = enum.auto()  # a schema or a list
    BY_NAME = enum.auto()  # an object of them


ENFORCED: Final = {
    "type": Holds.VALUE,
    "enum": Holds.VALUE,
    "const": Holds.VALUE,
    "multipleOf": Holds.VALUE,
    "maximum": Holds.VALUE,
    "exclusiveMaximum": Holds.VALUE,
    "minimum": Holds.VALUE,
    "exclusiveMinimum": Holds.VALUE,
    "maxLength": Holds.VALUE,
    "minLength": Holds.VALUE,
    "pattern": Holds.VALUE,
    "format": Holds.VALUE,
    "items": Holds.ONE_OR_MORE,
    "prefixItems": Holds.SCHEMAS,
    "additionalItems": Holds.SCHEMA,
    "maxItems": Holds.VALUE,
    "minItems": Holds.VALUE,
    "properties": Holds.BY_NAME,
    "patternProperties": Holds.BY_NAME,
    "additionalProperties": Holds.SCHEMA,
    "required": Holds.VALUE,
    "maxProperties": Holds.VALUE,
    "minProperties": Holds.VALUE,
    "allOf": Holds.SCHEMAS,
    "anyOf": Holds.SCHEMAS,
    "oneOf": Holds.SCHEMAS,
    "$ref": Holds.VALUE,
    "$defs": Holds.BY_NAME,
    "definitions": Holds.BY_NAME,
    "$id": Holds.VALUE,
    "$anchor": Holds.VALUE,
}
"""The keywords that say what is valid, or where a part is found; an answer follows each of them."""

ANNOTATIONS: Final = (
    "$schema",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
)
"""Accepted: by the standard they say nothing about what is valid."""

REFUSED: Final = (
    "uniqueItems",
    "contains",
    "maxContains",
    "minContains",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "not",
    "if",
    "then",
    "else",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$vocabulary",
)
"""Keywords of the standards that no answer could be held to. Any other name is refused likewise."""

FORMATS: Final = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uuid",
)
"""The values of `format` that are enforced, on strings."""

DRAFTS: Final = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
)
"""The values of `$schema` that are followed, with or without a `#` at the end; absent it is the first."""

MAX_DEPTH: Final = 50  # schemas within schemas
MAX_PROPERTIES: Final = 1000  # of one object
MAX_PATTERN_PROPERTIES: Final = 100  # of a whole schema
MAX_MULTIPLE: Final = 20_000  # least common multiple of a schema's `multipleOf`, without their decimal point


def check_schema(schema: Any, place: str) -> None:
    """Hold a schema against the table of keywords and the limits above.

    Args:
        place: the field that it stands in, for errors to begin with.

    Raises:
        APIError: 400; names the keyword and its place.
    """
    multiples: list[Decimal] = []
    pattern_properties = 0
    tuples: list[str] = []  # where `prefixItems` is: the compiler passes over it in older drafts
    newest = True
    waiting = [(schema, place, 1)]
    while waiting:
        part, at, depth = waiting.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise bad_request(f"{at} must be a schema (an object or a boolean), not {shown(part)}", place)
        if depth > MAX_DEPTH:
            raise bad_request(f"{place} has schemas nested more than {MAX_DEPTH} deep", place)
        for keyword, value in part.items():
            if keyword in ANNOTATIONS:
                continue
            holds = ENFORCED.get(keyword)
            if holds is None:
                raise _not_enforced(keyword, at, place)
            if holds is Holds.BY_NAME and not isinstance(value, dict):
                raise bad_request(f"{at}.{keyword} must be an object, not {shown(value)}", place)
            waiting += [(inner, f"{at}.{keyword}{name}", depth + 1) for name, inner in _inside(holds, value)]
        if len(part.get("properties") or ()) > MAX_PROPERTIES:
            raise bad_request(f"{at}.properties has more than {MAX_PROPERTIES} properties", place)
        pattern_properties += len(part.get("patternProperties") or ())
        _check_format(part, at, place)
        _check_least(part, at, place)
        if "$schema" in part:
            newest = _draft(part["$schema"], at, place) == DRAFTS[0] and newest
        if "prefixItems" in part:
            tuples.append(at)
            newest = newest and "additionalItems" not in part and not isinstance(part.get("items"), list)
        multiple = part.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool) and math.isfinite(multiple):
            multiples.append(Decimal(str(multiple)))
    if tuples and not newest:
        raise bad_request(
            f"{tuples[0]}: the keyword 'prefixItems' is not enforced where a $schema is older than 2020-12, "
            "nor beside additionalItems or a list of items",
            place,
            "unsupported_schema",
        )
    if pattern_properties > MAX_PATTERN_PROPERTIES:
        raise bad_request(f"{place} has more than {MAX_PATTERN_PROPERTIES} patternProperties", place)
    _check_multiples(multiples, place)


def _inside(holds: Holds, value: Any) -> Iterator[tuple[str, Any]]:
    """The schemas in a keyword's value, each with how its place goes on."""
    if holds is Holds.BY_NAME and isinstance(value, dict):
        yield from ((f".{name}", inner) for name, inner in value.items())
    elif holds in (Holds.SCHEMAS, Holds.ONE_OR_MORE) and isinstance(value, list):
        yield from ((f"[{i}]", inner) for i, inner in enumerate(value))
    elif holds in (Holds.SCHEMA, Holds.ONE_OR_MORE):
        yield "", value


def _draft(value: Any, at: str, place: str) -> str:
    """The one of `DRAFTS` that `$schema` names."""
    name = value.removesuffix("#") if isinstance(value, str) else ""
    if name not in DRAFTS:
        raise bad_request(
            f"{at}.$schema is {shown(value)}, which is not supported; these are: {', '.join(DRAFTS)}",
            place,
            "unsupported_schema",
        )
    return name


def _check_least(part: dict[str, Any], at: str, place: str) -> None:
    """Raises where `minProperties` asks for two keys that no schema names: they might be the same twice."""
    least, required = part.get("minProperties"), part.get("required")
    most = 1 + (len(set(map(str, required))) if isinstance(required, list) else 0)
    if isinstance(least, int) and least > most:
        raise bad_request(
            f"{at}: the keyword 'minProperties' is not enforced above {most}, one more than are required",
            place,
            "unsupported_schema",
        )


def _check_format(part: dict[str, Any], at: str, place: str) -> None:
    if "format" not in part:
        return
    name, kind = part["format"], part.get("type", "string")
    if name not in FORMATS:
        raise bad_request(
            f"{at}.format is {shown(name)}, which is not enforced; these are: {', '.join(FORMATS)}",
            place,
            "unsupported_schema",
        )
    if kind != "string" and not (isinstance(kind, list) and "string" in kind):
        raise bad_request(f"{at}.format is {shown(name)}, which is for strings only", place)


def _check_multiples(multiples: list[Decimal], place: str) -> None:
    """Raises for values whose multiples a grammar could tell apart with very many states only."""
    digits = max((-int(value.as_tuple().exponent) for value in multiples), default=0)
    whole = [int(value.scaleb(max(digits, 0))) for value in multiples if abs(value.adjusted()) < 100]
    least = math.lcm(*filter(None, whole)) if whole else 0
    if least > MAX_MULTIPLE or len(whole) < len(multiples):
        raise bad_request(
            f"{place}: the least common multiple of its multipleOf values, "
            f"without their decimal point, is above {MAX_MULTIPLE}",
            place,
        )


def _not_enforced(keyword: str, at: str, place: str) -> APIError:
    known = "is not enforced" if keyword in REFUSED else "is no keyword that is known here"
    return bad_request(f"{at}: the keyword {shown(keyword)} {known}", place, "unsupported_schema")
