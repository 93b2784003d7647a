"""Which keywords of JSON Schema (2020-12 to 6) an answer's grammar enforces, and a check for all others.

A keyword that would be ignored is refused by its name and place; so is a value that the grammar compiler
would follow wrongly, or not at all. What it refuses itself (a look-around in a `pattern`) it says when it
compiles.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from typing import Any, Final, NamedTuple

from servelite.frontend.errors import APIError, bad_request
from servelite.frontend.fields import JSONObject, shown
from servelite.frontend.patterns import CONTROLS, UNWRITTEN, narrowed
from servelite.frontend.repetitions import MAX_RUN, run_of_expression
from servelite.frontend.schema_forms import as_properties, follow_format, newest_tuple, within_one
from servelite.frontend.string_formats import BY_PATTERN, FORMATS, MAX_LENGTHS, NUMBERS
from servelite.frontend.unions import Unions, as_uri, require, resolve, same


class Holds(enum.Enum):
    """What a keyword's value is, in words for errors, or of what schemas it is made."""

    VALUE = "anything"
    VALUES = "a list"
    TYPES = "the name of a type, or a list of such names"
    NUMBER = "a number"
    COUNT = "a whole number, at least 0"
    TEXT = "a string"
    NAMES = "a list of strings"
    OBJECT = "an object"
    SCHEMA = "a schema"
    SCHEMAS = "a list of one schema or more"
    ONE_OR_MORE = "a schema, or a list of schemas"
    BY_NAME = "an object of schemas"


ENFORCED: Final = {
    "type": Holds.TYPES,
    "enum": Holds.VALUES,
    "const": Holds.VALUE,
    "multipleOf": Holds.NUMBER,
    "maximum": Holds.NUMBER,
    "exclusiveMaximum": Holds.NUMBER,
    "minimum": Holds.NUMBER,
    "exclusiveMinimum": Holds.NUMBER,
    "maxLength": Holds.COUNT,
    "minLength": Holds.COUNT,
    "pattern": Holds.TEXT,
    "format": Holds.TEXT,
    "items": Holds.ONE_OR_MORE,
    "prefixItems": Holds.SCHEMAS,
    "additionalItems": Holds.SCHEMA,
    "maxItems": Holds.COUNT,
    "minItems": Holds.COUNT,
    "properties": Holds.BY_NAME,
    "patternProperties": Holds.BY_NAME,
    "additionalProperties": Holds.SCHEMA,
    "propertyNames": Holds.SCHEMA,
    "required": Holds.NAMES,
    "maxProperties": Holds.COUNT,
    "minProperties": Holds.COUNT,
    "allOf": Holds.SCHEMAS,
    "anyOf": Holds.SCHEMAS,
    "oneOf": Holds.SCHEMAS,
    "discriminator": Holds.OBJECT,
    "$ref": Holds.TEXT,
    "$defs": Holds.BY_NAME,
    "definitions": Holds.BY_NAME,
    "$id": Holds.TEXT,
    "$anchor": Holds.TEXT,
}
"""The keywords that say what is valid, or where a part is found; an answer follows each of them."""

ANNOTATIONS: Final = (
    *("$schema", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly"),
    *("writeOnly", "contentEncoding", "contentMediaType", "contentSchema"),
)
"""Accepted: by the standard they say nothing about what is valid."""
_OF_OPENAPI: Final = ("example", "externalDocs", "xml")  # likewise; and names that begin with x-
_AS_WITHOUT: Final = (("uniqueItems", False), ("nullable", False))

REFUSED: Final = (
    *("uniqueItems", "contains", "maxContains", "minContains", "dependentRequired", "dependentSchemas"),
    *("dependencies", "unevaluatedItems", "unevaluatedProperties", "not", "if", "then", "else"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary"),
)
"""Keywords of the standards that no answer could be held to. Any other name is refused likewise."""

DRAFTS: Final = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
)
"""The values of `$schema` that are followed, with or without a `#` at the end; absent it is the first."""

MAX_DEPTH: Final = 50  # schemas within schemas
MAX_JSON_DEPTH: Final = 120  # lists and objects within each other
MAX_SUBSCHEMAS: Final = 10_000
MAX_PROPERTIES: Final = 1000  # of one object
MAX_PATTERN_PROPERTIES: Final = 100  # of a whole schema
MAX_MULTIPLE: Final = 20_000  # least common multiple of a schema's `multipleOf`, without their decimal point
MAX_BOUNDED_MULTIPLE: Final = 5_000  # where a bound is beside it: the states of both multiply
MAX_NUMBER: Final = 2**53 - 1  # what a double holds exactly, and so any reader of JSON
MIN_NUMBER: Final = 1e-30  # nearest to 0, but for it
MAX_COUNT: Final = 2**31 - 1

_BOUNDS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_TYPES: Final = ("string", "number", "integer", "boolean", "null", "array", "object")
_OTHERS: Final = {
    "prefixItems": "items",
    "patternProperties": "additionalProperties",
    "properties": "additionalProperties",
}
"""Keywords, and the one that speaks of what they leave: it would speak of more without them."""


def enforceable(
    schema: Any, place: str, *, loose: bool = False, unknown: Callable[[str], None] | None = None
) -> Any:
    """A schema as the compiler follows it, held against the table of keywords and the limits above.

    What asks nothing is left out, and some is written otherwise. An answer that fits what is returned fits
    `schema`, unless that is `loose`.

    Args:
        place: the field that it stands in, for errors to begin with.
        loose: leave out what cannot be enforced.
        unknown: called with the place of each keyword that no standard has; None: it is an error.

    Raises:
        APIError: 400; names the keyword and its place.
    """
    if isinstance(schema, Mapping):
        JSONObject(MAX_JSON_DEPTH).read(place, schema)
    walk = _Walk(schema, place, loose, unknown)
    made = walk.schema(schema, place, 1, _Within(False, False))
    for branches, name in walk.tagged:
        for branch in branches:
            require(branch, name, made)
    return made


class _Within(NamedTuple):
    """What holds for a schema by those that it is in."""

    old: bool  # by a `$schema` it is older than 2020-12
    apart: bool  # by an `$id` of its own its references do not begin at the root


class _Walk:
    """One way through a schema."""

    def __init__(self, root: Any, place: str, loose: bool, unknown: Callable[[str], None] | None) -> None:
        self._root = root
        self._place = place
        self._loose = loose
        self._unknown = unknown
        self._unions = Unions(root)
        self._subschemas = 0
        self._pattern_properties = 0
        self._multiples: list[Decimal] = []
        self.tagged: list[tuple[list[Any], str]] = []  # branches, and the property that tells them apart

    def schema(self, part: Any, at: str, depth: int, within: _Within) -> Any:
        """`part` as it is enforced."""
        if isinstance(part, bool):
            return part
        if not isinstance(part, dict):
            raise self._refused(f"{at} must be a schema (an object or a boolean), not {shown(part)}")
        self._subschemas += 1
        if depth > MAX_DEPTH:
            raise self._refused(f"{self._place} has schemas nested more than {MAX_DEPTH} deep")
        if self._subschemas > MAX_SUBSCHEMAS:
            raise self._refused(f"{self._place} has more than {MAX_SUBSCHEMAS} schemas in it")
        kept: dict[str, Any] = {}
        old = _draft(part["$schema"]) != DRAFTS[0] if "$schema" in part else within.old
        based = not str(part.get("$id", "#")).startswith("#")  # else it is a name, as of older drafts
        within = _Within(old, within.apart or (based and depth > 1))
        for keyword, value in part.items():
            try:
                if keyword == "$schema" and _draft(value) not in DRAFTS:
                    known = f"which is not supported; these are: {', '.join(DRAFTS)}"
                    raise self._unsupported(f"{at}.$schema is {shown(value)}, {known}")
                if _asks_nothing(keyword, value):
                    continue
                if self._unknown is not None and keyword not in ENFORCED and keyword not in REFUSED:
                    self._unknown(f"{at}.{keyword}")
                else:
                    kept[keyword] = self._keyword(keyword, value, part, f"{at}.{keyword}", depth, within)
            except APIError:
                if not self._loose:
                    raise
        for keyword, other in _OTHERS.items():
            if keyword in part and keyword not in kept:
                kept.pop(other, None)
        kept.pop("discriminator", None)
        if not based:
            kept.pop("$id", None)
        if "format" in kept:
            follow_format(kept)
        within_one(kept)
        if "propertyNames" in kept:
            as_properties(kept)
        newest_tuple(kept)
        if "oneOf" in kept:
            self._exclusive(part["oneOf"], kept)
        return kept

    def _keyword(
        self, keyword: str, value: Any, part: dict[str, Any], at: str, depth: int, within: _Within
    ) -> Any:
        """A keyword's value as it is enforced."""
        holds = ENFORCED.get(keyword)
        if holds is None:
            raise _not_enforced(keyword, at.removesuffix(f".{keyword}"), self._place)
        if not _holds(holds, value):
            raise self._refused(f"{at} is {shown(value)}; it must be {holds.value}")
        check = _CHECKS.get(keyword)
        if check is not None:
            value = check(self, keyword, value, part, at, within)
        if holds is Holds.BY_NAME:
            return {name: self.schema(one, f"{at}.{name}", depth + 1, within) for name, one in value.items()}
        if holds in (Holds.SCHEMAS, Holds.ONE_OR_MORE) and isinstance(value, list):
            return [self.schema(one, f"{at}[{i}]", depth + 1, within) for i, one in enumerate(value)]
        return (
            self.schema(value, at, depth + 1, within) if holds in (Holds.SCHEMA, Holds.ONE_OR_MORE) else value
        )

    def _refused(self, text: str, code: str = "invalid_grammar") -> APIError:
        return bad_request(text, self._place, code)

    def _unsupported(self, text: str) -> APIError:
        return self._refused(text, "unsupported_schema")

    # ------------------------------------------------------------ checks of values: what is enforced of them

    def _number(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        """A bound within `MAX_NUMBER`: one beyond it, which asks for less, becomes that."""
        if abs(value) <= MAX_NUMBER and not 0 < abs(value) < MIN_NUMBER:
            return value
        if abs(value) < 1 or (value > 0) != keyword.lower().endswith("maximum"):
            raise self._unsupported(
                f"{at} is {shown(value)}; bounds are enforced from -{MAX_NUMBER} to {MAX_NUMBER}, "
                f"and no nearer to 0 than {MIN_NUMBER}"
            )
        return MAX_NUMBER if value > 0 else -MAX_NUMBER

    def _multiple(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        """Raises for values whose multiples a grammar could tell apart with very many states only."""
        if value <= 0:
            raise self._refused(f"{at} is {shown(value)}; it must be above 0")
        most = MAX_BOUNDED_MULTIPLE if _BOUNDS & part.keys() else MAX_MULTIPLE
        values = [*self._multiples, Decimal(str(value))]
        digits = max(0, *(-int(one.as_tuple().exponent) for one in values))
        if (
            any(abs(one.adjusted()) > 100 for one in values)
            or math.lcm(*(int(one.scaleb(digits)) for one in values)) > most
        ):
            raise self._refused(
                f"{at} is {shown(value)}: the least common multiple of all multipleOf, "
                f"without their decimal point, is above {most}"
            )
        self._multiples = values
        return value

    def _count(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        """A bound within `MAX_COUNT`. `minProperties` may not ask for two keys that no schema names: they
        might be the same twice."""
        if keyword.startswith("min") and value > MAX_COUNT:
            raise self._refused(f"{at} is {shown(value)}; the limit is {MAX_COUNT}")
        required = part.get("required")
        most = 1 + (len(set(map(str, required))) if isinstance(required, list) else 0)
        if keyword == "minProperties" and value > most:
            raise self._unsupported(
                f"{at.removesuffix('.minProperties')}: the keyword 'minProperties' is not enforced above "
                f"{most}, one more than are required"
            )
        return min(int(value), MAX_COUNT)

    def _values(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, list):
                waiting += one
            elif isinstance(one, dict):
                self._values("required", list(one), part, at, within)
                waiting += one.values()
            elif isinstance(one, str) and keyword != "required" and UNWRITTEN.search(one):
                raise self._unsupported(f"{at} has the text {shown(one)}; {CONTROLS}")
            elif isinstance(one, str) and len(one) > MAX_RUN:
                raise self._refused(f"{at} has a text of {len(one)} characters; the limit is {MAX_RUN}")
            elif isinstance(one, int | float) and not abs(one) <= MAX_NUMBER:
                bounds = f"numbers are enforced from -{MAX_NUMBER} to {MAX_NUMBER}"
                raise self._unsupported(f"{at} has the number {shown(one)}; {bounds}")
        return value

    def _pattern(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        return self._expression(value, at)

    def _expression(self, pattern: str, at: str) -> str:
        run = run_of_expression(pattern)
        if run > MAX_RUN:
            raise self._refused(f"{at} is {shown(pattern)}, which {run_text(run)}")
        try:
            return narrowed(pattern)
        except ValueError as error:
            raise self._unsupported(f"{at} is {shown(pattern)}: {error}") from None

    def _format(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        by_pattern = value in BY_PATTERN and ("pattern" in part or "allOf" in part)
        if value not in FORMATS and value not in NUMBERS and not by_pattern:
            known = ", ".join((*FORMATS, *NUMBERS))
            raise self._unsupported(f"{at} is {shown(value)}, which is not enforced; these are: {known}")
        kinds = part.get("type", "string")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        wanted = {"integer", "number"} if value in NUMBERS else {"string"}
        if not wanted.intersection(kinds):
            what = "numbers" if value in NUMBERS else "strings"
            raise self._refused(f"{at} is {shown(value)}, which is for {what} only")
        return value

    def _reference(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        uri = as_uri(value)
        if within.apart and uri.startswith("#"):
            raise self._unsupported(
                f"{at} is {shown(value)}; below a part with an $id of its own, none is followed"
            )
        if resolve(self._root, uri) is None and not self._has_names:
            raise self._refused(f"{at} is {shown(value)}, which is not in this schema")
        return uri

    @cached_property
    def _has_names(self) -> bool:
        """Whether there are names by which references may go, beside places."""
        return re.search(r'"\$(id|anchor)": ', json.dumps(self._root)) is not None

    def _properties(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        if len(value) > MAX_PROPERTIES:
            raise self._refused(f"{at} has {len(value)} properties; the limit is {MAX_PROPERTIES}")
        self._values("required", list(value), part, at, within)
        return value

    def _patterns(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        self._pattern_properties += len(value)
        if self._pattern_properties > MAX_PATTERN_PROPERTIES:
            raise self._refused(f"{self._place} has more than {MAX_PATTERN_PROPERTIES} patternProperties")
        return {self._expression(pattern, at): one for pattern, one in value.items()}

    def _names(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        """A schema that lists names, or has one expression for them, or none."""
        asked = _asked_of_names(value)
        if set(asked) == {"$ref"} and not within.apart:
            asked = _asked_of_names(resolve(self._root, asked["$ref"]))
        words, patterns = set(asked), part.get("patternProperties")
        one = words in ({"pattern"}, {"format"}) and str(asked.get("format")) not in MAX_LENGTHS
        listed = asked.get("enum", [asked.get("const")])
        if isinstance(listed, list) and len(listed) > MAX_PROPERTIES:
            raise self._refused(f"{at} lists {len(listed)} names; the limit is {MAX_PROPERTIES}")
        if words in ({"enum"}, {"const"}) and not patterns:
            return {"enum": listed}
        if not words or (one and not patterns and not part.get("properties")):
            return asked
        raise self._unsupported(
            f"{at.removesuffix('.propertyNames')}: the keyword 'propertyNames' is enforced where it lists "
            "names (enum, const), or where it has one pattern or format and no properties are beside it"
        )

    def _tuple(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        if within.old or "additionalItems" in part or isinstance(part.get("items"), list):
            raise self._unsupported(
                f"{at.removesuffix('.prefixItems')}: the keyword 'prefixItems' is not enforced where the "
                "$schema is older than 2020-12, nor beside additionalItems or a list of items"
            )
        return value

    def _discriminator(self, keyword: str, value: Any, part: dict[str, Any], at: str, within: _Within) -> Any:
        """OpenAPI's: it says which branch a property's values choose, and must say what the branches do."""
        name, mapping = value.get("propertyName"), value.get("mapping") or {}
        branches = part.get("oneOf") or part.get("anyOf")
        sound = isinstance(name, str) and isinstance(mapping, dict)
        if sound and isinstance(branches, list) and self._unions.told_apart(branches, name) is not None:
            chosen = {tag: self._unions.tags(resolve(self._root, ref), name) for tag, ref in mapping.items()}
            if all(values is not None and same(tag) in values for tag, values in chosen.items()):
                return value
        raise self._unsupported(
            f"{at} is {shown(value)}; it is followed where each branch of its oneOf or anyOf lists other "
            "values of that property (const, enum), and its mapping says the same"
        )

    # ------------------------------------------------------------ of the keywords together

    def _exclusive(self, branches: list[Any], kept: dict[str, Any]) -> None:
        """`oneOf` as `anyOf`, where the branches exclude each other. Others are the compiler's to judge."""
        name = self._unions.told_apart(branches)
        if name is None and not self._loose:
            return
        union = {"anyOf": kept.pop("oneOf")}
        if name:
            self.tagged.append((union["anyOf"], name))
        if "anyOf" in kept:
            kept["allOf"] = [*kept.get("allOf", []), union]
        else:
            kept |= union


_CHECKS: Final[Mapping[str, Callable[[_Walk, str, Any, dict[str, Any], str, _Within], Any]]] = {
    **dict.fromkeys(_BOUNDS, _Walk._number),
    **{keyword: _Walk._count for keyword, holds in ENFORCED.items() if holds is Holds.COUNT},
    "multipleOf": _Walk._multiple,
    "enum": _Walk._values,
    "const": _Walk._values,
    "required": _Walk._values,
    "pattern": _Walk._pattern,
    "format": _Walk._format,
    "$ref": _Walk._reference,
    "properties": _Walk._properties,
    "patternProperties": _Walk._patterns,
    "propertyNames": _Walk._names,
    "prefixItems": _Walk._tuple,
    "discriminator": _Walk._discriminator,
}
"""What else a keyword's value is checked for: by the keyword, its value, the schema, the place, and whether
that is of an older draft; each gives the value as it is enforced."""


def with_each(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """A keyword's value with each schema that is in it as `change` gives it."""
    holds = ENFORCED.get(keyword)
    if holds is Holds.BY_NAME and isinstance(value, Mapping):
        return {name: change(one) for name, one in value.items()}
    if holds in (Holds.SCHEMAS, Holds.ONE_OR_MORE) and isinstance(value, list):
        return [change(one) for one in value]
    return change(value) if holds in (Holds.SCHEMA, Holds.ONE_OR_MORE) else value


def schemas_in(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas that one is made of, each with its place in it; those that it only defines apart."""
    for keyword, value in schema.items():
        holds = ENFORCED.get(keyword)
        if holds is Holds.BY_NAME and keyword not in ("$defs", "definitions"):
            yield from ((f".{keyword}.{name}", one) for name, one in value.items())
        elif holds in (Holds.SCHEMAS, Holds.ONE_OR_MORE) and isinstance(value, list):
            yield from ((f".{keyword}[{i}]", one) for i, one in enumerate(value))
        elif holds in (Holds.SCHEMA, Holds.ONE_OR_MORE):
            yield f".{keyword}", value


def run_text(run: int) -> str:
    """The end of an error about a run that is too long."""
    return f"leaves no choice for {run} characters on end; the limit is {MAX_RUN}"


def _asked_of_names(schema: Any) -> dict[str, Any]:
    """What a schema asks of strings."""
    if not isinstance(schema, dict):
        return {} if schema is True else {"not": {}}
    return {
        word: value
        for word, value in schema.items()
        if word not in ANNOTATIONS and (word, value) != ("type", "string")
    }


def _draft(value: Any) -> str:
    return value.removesuffix("#") if isinstance(value, str) else ""


def _holds(holds: Holds, value: Any) -> bool:
    """Whether a keyword's value is of its kind; the schemas in it are looked at later."""
    number = type(value) is int or (isinstance(value, float) and math.isfinite(value))
    match holds:
        case Holds.NUMBER:
            return number
        case Holds.COUNT:
            return number and value >= 0 and value == value // 1
        case Holds.TEXT:
            return isinstance(value, str)
        case Holds.VALUES:
            return isinstance(value, list)
        case Holds.SCHEMAS:
            return isinstance(value, list) and bool(value)
        case Holds.NAMES:
            return isinstance(value, list) and all(isinstance(one, str) for one in value)
        case Holds.TYPES:
            named = value if isinstance(value, list) else [value]
            return bool(named) and all(one in _TYPES for one in named)
        case Holds.BY_NAME | Holds.OBJECT:
            return isinstance(value, dict)
    return True


def _asks_nothing(keyword: str, value: Any) -> bool:
    return (
        (value is None and keyword != "const")
        or keyword in ANNOTATIONS
        or keyword in _OF_OPENAPI
        or keyword.startswith("x-")
        or (keyword, value) in _AS_WITHOUT
    )


def _not_enforced(keyword: str, at: str, place: str) -> APIError:
    known = "is not enforced" if keyword in REFUSED else "is no keyword that is known here"
    return bad_request(f"{at}: the keyword {shown(keyword)} {known}", place, "unsupported_schema")
