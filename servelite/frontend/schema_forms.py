"""Keywords of a schema in the forms that the compiler follows."""

from __future__ import annotations

import math
from typing import Any, Final

from servelite.frontend.string_formats import FORMATS, MAX_LENGTHS, NUMBERS

_NEAR: Final = 1e-9


def follow_format(kept: dict[str, Any]) -> None:
    """`format` by an expression and a length; of numbers, by bounds."""
    name = kept.pop("format")
    if (bounds := NUMBERS.get(name)) is not None:
        kept["minimum"] = max(bounds[0], kept.get("minimum", bounds[0]))
        kept["maximum"] = min(bounds[1], kept.get("maximum", bounds[1]))
    if name in MAX_LENGTHS:
        kept["maxLength"] = min(MAX_LENGTHS[name], kept.get("maxLength", MAX_LENGTHS[name]))
    if FORMATS.get(name):
        expression = {"pattern": f"^(?:{FORMATS[name]})$"}
        kept |= {"allOf": [*kept.get("allOf", []), expression]} if "pattern" in kept else expression


def within_one(kept: dict[str, Any]) -> None:
    """Bounds of fractions less than 1 apart that are excluded, as others a little nearer: the compiler allows
    an excluded whole number there."""
    low = max(kept.get("minimum", -math.inf), kept.get("exclusiveMinimum", -math.inf))
    high = min(kept.get("maximum", math.inf), kept.get("exclusiveMaximum", math.inf))
    if kept.get("type") == "integer" or high - low >= 1:
        return
    if "exclusiveMinimum" in kept:
        kept["minimum"] = max(kept.pop("exclusiveMinimum") + _NEAR, kept.get("minimum", -math.inf))
    if "exclusiveMaximum" in kept:
        kept["maximum"] = min(kept.pop("exclusiveMaximum") - _NEAR, kept.get("maximum", math.inf))


def as_properties(kept: dict[str, Any]) -> None:
    """`propertyNames` as the properties that it lists, or the pattern of those that it allows."""
    names, value = kept.pop("propertyNames"), kept.get("additionalProperties", True)
    if "enum" in names:
        known = kept.get("properties", {})
        kept["properties"] = {name: known.get(name, value) for name in names["enum"] if isinstance(name, str)}
    elif "pattern" in names:
        kept["patternProperties"] = {names["pattern"]: value}
    if names:
        kept["additionalProperties"] = False


def newest_tuple(kept: dict[str, Any]) -> None:
    """The older drafts' list of `items` as `prefixItems`, which the compiler follows in all of them."""
    rest = kept.pop("additionalItems", None)
    if isinstance(kept.get("items"), list):
        kept["prefixItems"] = kept.pop("items")
        if rest is not None:
            kept["items"] = rest
