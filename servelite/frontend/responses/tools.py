"""A Responses body's tools and text format, as a chat's: the same things, one level flatter."""

from __future__ import annotations

from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import OneOf, check_names, shown
from servelite.frontend.shapes import Items, asked
from servelite.frontend.tools import MAX_TOOLS

_TOOL: Final = ("name", "description", "parameters", "strict")
_FORMAT: Final = ("name", "description", "schema", "strict")
_CHOICES: Final = ("none", "auto", "required")

_FUNCTION: Final = {
    "type": "function",
    "name": str,
    "description?": str,
    "parameters?": dict,
    "strict?": bool,
}
_NAMED: Final = {"type": "function", "name": str}
_JSON_SCHEMA: Final = {
    "type": "json_schema",
    "name": str,
    "schema": dict,
    "description?": str,
    "strict?": bool,
}
TOOLS_SCHEMA: Final = Items(_FUNCTION, 0, MAX_TOOLS).schema()
TOOL_CHOICE_SCHEMA: Final = asked((OneOf(_CHOICES), _NAMED))
FORMAT_SCHEMA: Final = asked(({"type": OneOf(("text", "json_object"))}, _JSON_SCHEMA))


def read_tools(path: str, value: Any) -> list[dict[str, Any]]:
    """A chat's `tools`, which the chat checks further; raises `APIError` (400)."""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a list of tools, not {shown(value)}", path)
    if len(value) > MAX_TOOLS:
        raise bad_request(f"{path} has {len(value)} tools; the limit is {MAX_TOOLS}", path)
    return [_read_tool(f"{path}[{i}]", tool) for i, tool in enumerate(value)]


def _read_tool(path: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise bad_request(f"{path} must be an object, not {shown(tool)}", path)
    if tool.get("type") != "function":
        raise bad_request(
            f"{path}.type is {shown(tool.get('type'))}, which is not supported: only function tools are",
            f"{path}.type",
            "unsupported_value",
        )
    return {"type": "function", "function": _named(path, tool, _TOOL)}


def read_tool_choice(path: str, value: Any) -> str | dict[str, Any]:
    """A chat's `tool_choice`; raises `APIError` (400)."""
    if value in _CHOICES:
        return str(value)
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str):
        return {"type": "function", "function": _named(path, value, ("name",))}
    raise bad_request(
        f"{path} is {shown(value)}; it must be none, auto, required or an object with type function and name",
        path,
    )


def read_format(path: str, value: Any) -> dict[str, Any]:
    """A chat's `response_format`; raises `APIError` (400)."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("text", "json_object"):
        return {"type": kind, **_named(path, value, ())}
    if kind == "json_schema":
        return {"type": kind, "json_schema": _named(path, value, _FORMAT)}
    raise bad_request(
        f"{path} is {shown(value)}; it must be an object with type text, json_object or json_schema", path
    )


def _named(path: str, value: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """What of `value` has these names; nothing else but its type may be there."""
    check_names(path, value, (*names, "type"))
    return {name: value[name] for name in names if value.get(name) is not None}
