"""What a Messages body says of tools, thinking and the answer's form, as a chat says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import Integer, OneOf, check_names, shown
from servelite.frontend.sampling import MAX_TOKENS
from servelite.frontend.shapes import Items, asked
from servelite.frontend.tools import MAX_TOOLS

_HARMLESS: Final = ("cache_control", "eager_input_streaming")  # they ask nothing of the answer
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_KINDS: Final = ("enabled", "adaptive", "disabled")  # of thinking
_BUDGET: Final = Integer(1024, MAX_TOKENS)
_DISPLAY: Final = "summarized"

_TOOL: Final = {
    "type?": "custom",
    "name": str,
    "description?": str,
    "input_schema": dict,
    "strict?": bool,
} | {f"{name}?": Any for name in _HARMLESS}
_SINGLE: Final = {"disable_parallel_tool_use?": bool}
TOOLS_SCHEMA: Final = Items(_TOOL, 0, MAX_TOOLS).schema()
TOOL_CHOICE_SCHEMA: Final = asked(
    ({"type": OneOf(tuple(_CHOICES))} | _SINGLE, {"type": "tool", "name": str} | _SINGLE)
)
THINKING_SCHEMA: Final = asked({"type": OneOf(_KINDS), "budget_tokens?": _BUDGET, "display?": _DISPLAY})
FORMAT_SCHEMA: Final = asked({"type": "json_schema", "schema": dict})


@dataclass(frozen=True)
class ToolChoice:
    """A chat's `tool_choice` and `parallel_tool_calls`."""

    choice: str | dict[str, Any]
    parallel: bool


@dataclass(frozen=True)
class Thinking:
    """Whether the model thinks before it answers. `budget`: tokens; None: as many as it likes."""

    enabled: bool
    budget: int | None


def read_tools(path: str, value: Any) -> list[dict[str, Any]]:
    """A chat's `tools`, which the chat checks further; raises `APIError` (400)."""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a list of tools, not {shown(value)}", path)
    if len(value) > MAX_TOOLS:
        raise bad_request(f"{path} has {len(value)} tools; the limit is {MAX_TOOLS}", path)
    return [_read_tool(f"{path}[{i}]", tool) for i, tool in enumerate(value)]


def _read_tool(path: str, tool: Any) -> dict[str, Any]:
    tool = _fields(path, tool, ("type", "name", "description", "input_schema", "strict", *_HARMLESS))
    if tool.get("type", "custom") != "custom":
        raise bad_request(
            f"{path}.type is {shown(tool['type'])}, which is not supported: only custom tools are",
            f"{path}.type",
            "unsupported_value",
        )
    if "input_schema" not in tool:
        raise bad_request(f"{path}.input_schema is missing", f"{path}.input_schema", "missing_field")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def read_tool_choice(path: str, value: Any) -> ToolChoice:
    """Raises `APIError` (400)."""
    value = _fields(path, value, ("type", "name", "disable_parallel_tool_use"))
    kind, single = value.get("type"), value.get("disable_parallel_tool_use", False)
    if not isinstance(single, bool):
        where = f"{path}.disable_parallel_tool_use"
        raise bad_request(f"{where} must be true or false, not {shown(single)}", where)
    if isinstance(kind, str) and kind in _CHOICES and "name" not in value:
        return ToolChoice(_CHOICES[kind], not single)
    if kind == "tool" and isinstance(value.get("name"), str):
        return ToolChoice({"type": "function", "function": {"name": value["name"]}}, not single)
    raise bad_request(
        f"{path} is {shown(value)}; its type must be auto, any, none, or tool with the tool's name", path
    )


def read_thinking(path: str, value: Any) -> Thinking:
    """Whether the model thinks first, and how long at most; raises `APIError` (400)."""
    value = _fields(path, value, ("type", "budget_tokens", "display"))
    kind, budget = value.get("type"), value.get("budget_tokens")
    if kind not in _KINDS:
        raise bad_request(
            f"{path}.type is {shown(kind)}; it must be enabled, adaptive or disabled", f"{path}.type"
        )
    if budget is not None:
        _BUDGET.read(f"{path}.budget_tokens", budget)
    if value.get("display", _DISPLAY) != _DISPLAY:
        raise bad_request(
            f"{path}.display is {shown(value['display'])}, which is not supported: only {_DISPLAY} is",
            f"{path}.display",
            "unsupported_value",
        )
    return Thinking(kind != "disabled", budget if kind == "enabled" else None)


def read_output_format(path: str, value: Any) -> dict[str, Any]:
    """A chat's `response_format`; raises `APIError` (400)."""
    value = _fields(path, value, ("type", "schema"))
    if value.get("type") != "json_schema" or not isinstance(value.get("schema"), dict):
        raise bad_request(f"{path} is {shown(value)}; it must have type json_schema and a schema", path)
    schema = {"name": "answer", "schema": value["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _fields(path: str, value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """An object's fields that are not null."""
    if not isinstance(value, dict):
        raise bad_request(f"{path} must be an object, not {shown(value)}", path)
    check_names(path, value, names)
    return {name: one for name, one in value.items() if one is not None}
