"""The functions that a chat may call: their declarations, and which of them it has to call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import (
    REQUIRED,
    Boolean,
    Custom,
    Field,
    Harmless,
    JSONObject,
    Object,
    OneOf,
    Only,
    String,
    shown,
    unsupported_kind,
)
from servelite.frontend.parsers.sink import CallRules
from servelite.frontend.prompts import NOTES
from servelite.frontend.shapes import Items, asked

MAX_TOOLS: Final = 1024
MAX_SCHEMA_DEPTH: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_CHOICES: Final = ("none", "auto", "required")
_MODES: Final = ("auto", "required")  # of allowed tools
_OBJECTS: Final = ("object", ["object"], ["object", "null"], ["null", "object"])
"""Types of arguments, which always are an object."""


@dataclass(frozen=True)
class ToolChoice:
    """`mode`: none, auto, required or named; `name`: of the function, where it is named; `allowed`: the names
    of the only ones there are for this answer, where only some are."""

    mode: str
    name: str = ""
    allowed: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ToolUse:
    """What a chat says about tools.

    Attributes:
        tools: the declarations as they were sent, which is how templates want them; no others than those
            that are allowed.
        parallel: more than one call may be made.
        places: in the request, of the schemas of their arguments; (): those of a chat's.
    """

    tools: tuple[dict[str, Any], ...] = ()
    choice: ToolChoice = ToolChoice("auto")
    parallel: bool = True
    places: tuple[str, ...] = ()

    @property
    def wanted(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.tools) and self.choice.mode != "none"

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice.mode in ("required", "named")

    @property
    def call_rules(self) -> CallRules:
        """What the parser is told."""
        parameters = {tool["function"]["name"]: parameters_of(tool["function"]) for tool in self.tools}
        return CallRules(parameters, 0 if self.parallel else 1, self.forced)


NO_TOOLS: Final = ToolUse(choice=ToolChoice("none"))


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments; without one it has none, as in OpenAI's API."""
    return function.get("parameters") or _NO_ARGUMENTS


def read_tools(path: str, value: Any) -> dict[str, dict[str, Any]]:
    """The functions of `tools` by their places in the request; each name once."""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a list of functions, not {shown(value)}", path)
    if len(value) > MAX_TOOLS:
        raise bad_request(f"{path} has {len(value)} functions; the limit is {MAX_TOOLS}", path)
    tools: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for i, tool in enumerate(value):
        at = f"{path}[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "function"):  # another type has other fields
            unsupported_kind(f"{at}.type", kind, "only functions are")
            continue
        read = _TOOL.read(at, tool)
        name = read["function"]["name"]
        if name in names:
            raise bad_request(f"{at}.function.name {name!r} is there twice", f"{at}.function.name")
        names.add(name)
        tools[at] = _in_order(tool, read | {"function": _in_order(tool["function"], read["function"])})
    return tools


def _in_order(sent: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """What was read of an object, in the object's own order, which templates write out."""
    return {name: read[name] for name in sent if read.get(name) is not None}


def read_tool_choice(path: str, value: Any) -> ToolChoice:
    """`none`, `auto`, `required`, or an object that names a function or those that are allowed."""
    if isinstance(value, str) and value in _CHOICES:
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise bad_request(
            f"{path} is {shown(value)}; it must be one of: {', '.join(_CHOICES)}, or an object "
            '{"type": "function", "function": {"name": ...}}',
            path,
        )
    if value.get("type") == "allowed_tools":
        allowed = _ALLOWED.read(path, value)["allowed_tools"]
        return ToolChoice(allowed["mode"], allowed=allowed["tools"])
    return ToolChoice("named", _NAMED.read(path, value)["function"]["name"])


def tool_use(values: Mapping[str, Any]) -> ToolUse:
    """From the values of TOOL_FIELDS; raises `APIError` (400) where they contradict each other."""
    tools: dict[str, dict[str, Any]] = values["tools"] or {}
    choice: ToolChoice = values["tool_choice"] or ToolChoice("auto" if tools else "none")
    if choice.mode in ("required", "named") and not tools:
        raise bad_request("tool_choice asks for a call, and there are no tools", "tool_choice")
    wanted = (choice.name,) if choice.mode == "named" else choice.allowed or ()
    names = [tool["function"]["name"] for tool in tools.values()]
    for name in wanted:
        if name not in names:
            raise bad_request(
                f"tool_choice names the function {name!r}, which is not among the tools", "tool_choice"
            )
    if choice.allowed is not None:
        tools = {at: tool for at, tool in tools.items() if tool["function"]["name"] in choice.allowed}
    places = tuple(f"{at}.function.parameters" for at in tools)
    parallel = values["parallel_tool_calls"] and choice.mode != "named"  # that function, once
    return ToolUse(tuple(tools.values()), choice, parallel, places) if tools else NO_TOOLS


def _read_type(path: str, value: Any) -> str:
    if value != "function":
        raise bad_request(
            f"{path} is {shown(value)}: only functions are supported", path, "unsupported_value"
        )
    return "function"


def _read_name(path: str, value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise bad_request(
            f"{path} is {shown(value)}; it must be 1 to 128 letters, digits, underscores and dashes", path
        )
    return value


def _read_parameters(path: str, value: Any) -> dict[str, Any]:
    given = JSONObject(MAX_SCHEMA_DEPTH).read(path, value)
    schema = {keyword: one for keyword, one in given.items() if one is not None}
    if schema.get("type") in _OBJECTS:
        schema["type"] = "object"  # templates take the type for a word
    elif "type" in schema:
        raise bad_request(f"{path}.type is {shown(schema['type'])}; arguments are an object", f"{path}.type")
    if not isinstance(schema.get("properties", {}), dict):
        raise bad_request(
            f"{path}.properties is {shown(schema['properties'])}, not an object", f"{path}.properties"
        )
    return schema


def _read_allowed(path: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise bad_request(f"{path} must be a list of at least one function, not {shown(value)}", path)
    read = [_NAMED.read(f"{path}[{i}]", one) for i, one in enumerate(value)]
    return tuple(one["function"]["name"] for one in read)


_TYPE = Field("type", Custom(_read_type, "`function`", asked("function")), REQUIRED, "what it is")
NAME_SCHEMA: Final = {"type": "string", "pattern": f"^{_NAME.pattern}$"}
_FUNCTION_NAME = Field(
    "name", Custom(_read_name, "name", NAME_SCHEMA), REQUIRED, "what the model calls it by"
)
PARAMETERS_SCHEMA: Final = asked(
    {"type?": ("object", [OneOf(("object", "null"))]), "properties?": dict, "*": Any}
)
FUNCTION_FIELDS: Final = (
    _FUNCTION_NAME,
    Field("description", String(1 << 20), None, "what it does, for the model"),
    Field(
        "parameters",
        Custom(_read_parameters, "JSON Schema", PARAMETERS_SCHEMA),
        None,
        "of its arguments",
    ),
    Field("strict", Boolean(), None, "a forced call's arguments always fit the schema"),
)
_NOTES: Final = tuple(Field(name, Harmless(), None, "accepted, without effect") for name in NOTES)
_FUNCTION: Final = Object((*FUNCTION_FIELDS, *_NOTES))
_NAMED_FUNCTION: Final = Object((_FUNCTION_NAME,))
_TOOL: Final = Object((_TYPE, Field("function", _FUNCTION, REQUIRED, "it"), *_NOTES))
_NAMED: Final = Object((_TYPE, Field("function", _NAMED_FUNCTION, REQUIRED, "it")))
_ALLOWED_TOOLS: Final = Object(
    (
        Field("mode", OneOf(_MODES), REQUIRED, "whether one has to be called"),
        Field(
            "tools", Custom(_read_allowed, "functions", Items(_NAMED, 1).schema()), REQUIRED, "their names"
        ),
    )
)
_ALLOWED: Final = Object(
    (
        Field("type", Only(("allowed_tools",)), REQUIRED, "what it is"),
        Field("allowed_tools", _ALLOWED_TOOLS, REQUIRED, "which"),
    )
)

TOOL_FIELDS: Final = (
    Field(
        "tools",
        Custom(read_tools, f"list of at most {MAX_TOOLS} functions", Items(_TOOL, 0, MAX_TOOLS).schema()),
        None,
        "functions the model may call",
    ),
    Field(
        "tool_choice",
        Custom(
            read_tool_choice,
            "`none`, `auto`, `required`, or an object with one function's name, or those that are allowed",
            asked((OneOf(_CHOICES), _NAMED, _ALLOWED)),
        ),
        None,
        "whether it calls: not at all, as it likes, at least once, that one once; absent: `auto` if `tools`",
    ),
    Field("parallel_tool_calls", Boolean(), True, "more than one call in an answer"),
)
