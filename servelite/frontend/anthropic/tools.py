"""What a Messages body says of tools, thinking and the answer's form, as a chat says it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from servelite.frontend.anthropic.tagged import ANY, Fields, Tagged
from servelite.frontend.errors import bad_request
from servelite.frontend.fields import (
    REQUIRED,
    Boolean,
    Field,
    Integer,
    JSONObject,
    Object,
    OneOf,
    shown,
    unsupported_kind,
)
from servelite.frontend.sampling import MAX_TOKENS
from servelite.frontend.shapes import Items, asked
from servelite.frontend.tools import FUNCTION_FIELDS, MAX_SCHEMA_DEPTH, MAX_TOOLS

_NAME, _DESCRIPTION, _PARAMETERS, _STRICT = FUNCTION_FIELDS
_HARMLESS: Final = (
    Field("cache_control", ANY, None, "every prompt is cached"),
    Field("eager_input_streaming", ANY, None, "input is always sent as it comes"),
    Field("defer_loading", ANY, None, "every tool is there from the start"),
    Field("allowed_callers", ANY, None, "only the model calls"),
    Field("input_examples", ANY, None, "without effect"),
)
_TOOL: Final = Object(
    (
        Field("type", OneOf(("custom",)), None, "what it is"),
        _NAME,
        _DESCRIPTION,
        replace(_PARAMETERS, name="input_schema", default=REQUIRED),
        _STRICT,
        *_HARMLESS,
    )
)
TOOLS_SCHEMA: Final = Items(_TOOL, 0, MAX_TOOLS).schema()

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_SINGLE: Final[Fields] = {"disable_parallel_tool_use?": Boolean()}
_CHOICE: Final = Tagged("type", dict.fromkeys(_CHOICES, _SINGLE) | {"tool": _SINGLE | {"name": _NAME.type}})
TOOL_CHOICE_SCHEMA: Final = _CHOICE.schema()

_HIDDEN: Final = "omitted"
_SHOWN: Final[Fields] = {"display?": OneOf(("summarized", _HIDDEN)), "block_binding?": ANY}
_THINKING: Final = Tagged(
    "type",
    {
        "enabled": _SHOWN | {"budget_tokens?": Integer(1024, MAX_TOKENS)},
        "adaptive": _SHOWN,
        "disabled": {},
    },
)
THINKING_SCHEMA: Final = _THINKING.schema()

_FORMAT: Final = Tagged("type", {"json_schema": {"schema": JSONObject(MAX_SCHEMA_DEPTH)}})
FORMAT_SCHEMA: Final = _FORMAT.schema()

_EDIT: Final = Tagged(
    "type",
    {
        "clear_thinking_20251015": {"keep?": ANY},
        "clear_tool_uses_20250919": {
            f"{name}?": ANY
            for name in ("trigger", "keep", "clear_at_least", "clear_tool_inputs", "exclude_tools")
        },
    },
)
EDITS_SCHEMA: Final = asked([_EDIT])


@dataclass(frozen=True)
class ToolChoice:
    """A chat's `tool_choice` and `parallel_tool_calls`."""

    choice: str | dict[str, Any]
    parallel: bool


@dataclass(frozen=True)
class Thinking:
    """Whether the model thinks before it answers. `budget`: tokens; None: as many as it likes.
    `hidden`: what it thinks is not told."""

    enabled: bool
    budget: int | None
    hidden: bool


def read_tools(path: str, value: Any) -> list[dict[str, Any]]:
    """A chat's `tools`, which the chat checks further; raises `APIError` (400)."""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a list of tools, not {shown(value)}", path)
    if len(value) > MAX_TOOLS:
        raise bad_request(f"{path} has {len(value)} tools; the limit is {MAX_TOOLS}", path)
    functions = []
    for i, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in (None, "custom"):
            functions.append(_function(_TOOL.read(f"{path}[{i}]", tool)))
        else:
            unsupported_kind(f"{path}[{i}].type", kind, "custom tools are")
    return functions


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = {f.name: tool[f.name] for f in (_NAME, _DESCRIPTION, _STRICT) if tool[f.name] is not None}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def read_tool_choice(path: str, value: Any) -> ToolChoice:
    """Raises `APIError` (400)."""
    choice = _CHOICE.read(path, value)
    parallel = not choice["disable_parallel_tool_use"]
    if choice["type"] == "tool":
        return ToolChoice({"type": "function", "function": {"name": choice["name"]}}, parallel)
    return ToolChoice(_CHOICES[choice["type"]], parallel)


def read_thinking(path: str, value: Any) -> Thinking:
    """Raises `APIError` (400)."""
    thinking = _THINKING.read(path, value)
    hidden = thinking.get("display") == _HIDDEN
    return Thinking(thinking["type"] != "disabled", thinking.get("budget_tokens"), hidden)


def read_edits(path: str, value: Any) -> None:
    """Raises `APIError` (400) for an edit that would change what is said, and not only leave it out."""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a list of edits, not {shown(value)}", path)
    for i, edit in enumerate(value):
        _EDIT.read(f"{path}[{i}]", edit)


def read_output_format(path: str, value: Any) -> dict[str, Any]:
    """A chat's `response_format`; raises `APIError` (400)."""
    schema = {"name": "answer", "schema": _FORMAT.read(path, value)["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}
