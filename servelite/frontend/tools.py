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
    JSONObject,
    Object,
    OneOf,
    String,
    shown,
)
from servelite.frontend.parsers.sink import CallRules
from servelite.frontend.shapes import Items, asked

MAX_TOOLS: Final = 128
MAX_SCHEMA_DEPTH: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_CHOICES: Final = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolChoice:
    """`mode`: none, auto, required or named; `name`: of the function, where it is named."""

    mode: str
    name: str = ""


@dataclass(frozen=True)
class ToolUse:
    """What a chat says about tools.

    Attributes:
        tools: the declarations as they were sent, which is how templates want them.
        parallel: more than one call may be made.
    """

    tools: tuple[dict[str, Any], ...] = ()
    choice: ToolChoice = ToolChoice("auto")
    parallel: bool = True

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
        return CallRules(parameters, 0 if self.parallel else 1)


NO_TOOLS: Final = ToolUse(choice=ToolChoice("none"))


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments; without one it has none, as in OpenAI's API."""
    return function.get("parameters") or _NO_ARGUMENTS


def read_tools(path: str, value: Any) -> tuple[dict[str, Any], ...]:
    """The functions of `tools`; each name once."""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a list of functions, not {shown(value)}", path)
    if len(value) > MAX_TOOLS:
        raise bad_request(f"{path} has {len(value)} functions; the limit is {MAX_TOOLS}", path)
    names: set[str] = set()
    for i, tool in enumerate(value):
        name = _TOOL.read(f"{path}[{i}]", _required(f"{path}[{i}]", tool, ("type", "function")))["function"]
        if name in names:
            raise bad_request(
                f"{path}[{i}].function.name {name!r} is there twice", f"{path}[{i}].function.name"
            )
        names.add(name)
    return tuple(value)


def read_tool_choice(path: str, value: Any) -> ToolChoice:
    """`none`, `auto`, `required`, or an object that names a function."""
    if isinstance(value, str) and value in _CHOICES:
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise bad_request(
            f"{path} is {shown(value)}; it must be one of: {', '.join(_CHOICES)}, or an object "
            '{"type": "function", "function": {"name": ...}}',
            path,
        )
    return ToolChoice("named", _NAMED.read(path, _required(path, value, ("type", "function")))["function"])


def tool_use(values: Mapping[str, Any]) -> ToolUse:
    """From the values of TOOL_FIELDS; raises `APIError` (400) where they contradict each other."""
    tools: tuple[dict[str, Any], ...] = values["tools"] or ()
    choice: ToolChoice = values["tool_choice"] or ToolChoice("auto" if tools else "none")
    if choice.mode in ("required", "named") and not tools:
        raise bad_request("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice.mode == "named" and all(tool["function"]["name"] != choice.name for tool in tools):
        raise bad_request(
            f"tool_choice names the function {choice.name!r}, which is not among the tools", "tool_choice"
        )
    return ToolUse(tools, choice, values["parallel_tool_calls"]) if tools else NO_TOOLS


def _required(path: str, value: Any, names: tuple[str, ...]) -> Any:
    """`value`, which if it is an object has all of `names`."""
    for name in names:
        if isinstance(value, dict) and value.get(name) is None:
            raise bad_request(f"{path}.{name} is missing", f"{path}.{name}", "missing_field")
    return value


def _read_type(path: str, value: Any) -> str:
    if value != "function":
        raise bad_request(
            f"{path} is {shown(value)}: only functions are supported", path, "unsupported_value"
        )
    return "function"


def _read_name(path: str, value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise bad_request(
            f"{path} is {shown(value)}; it must be 1 to 64 letters, digits, underscores and dashes", path
        )
    return value


def _read_parameters(path: str, value: Any) -> dict[str, Any]:
    schema = JSONObject(MAX_SCHEMA_DEPTH).read(path, value)
    if schema.get("type", "object") != "object":
        raise bad_request(f"{path}.type is {shown(schema['type'])}; arguments are an object", f"{path}.type")
    if not isinstance(schema.get("properties", {}), dict):
        raise bad_request(
            f"{path}.properties is {shown(schema['properties'])}, not an object", f"{path}.properties"
        )
    return schema


def _read_function(path: str, value: Any) -> str:
    read: str = _FUNCTION.read(path, _required(path, value, ("name",)))["name"]
    return read


def _read_named(path: str, value: Any) -> str:
    read: str = _NAMED_FUNCTION.read(path, _required(path, value, ("name",)))["name"]
    return read


_TYPE = Field("type", Custom(_read_type, "`function`", asked("function")), REQUIRED, "what it is")
NAME_SCHEMA: Final = {"type": "string", "pattern": f"^{_NAME.pattern}$"}
_FUNCTION_NAME = Field(
    "name", Custom(_read_name, "name", NAME_SCHEMA), REQUIRED, "what the model calls it by"
)
PARAMETERS_SCHEMA: Final = asked({"type?": "object", "properties?": dict, "*": Any})
_FUNCTION: Final = Object(
    (
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
)
_NAMED_FUNCTION: Final = Object((_FUNCTION_NAME,))
_TOOL: Final = Object(
    (_TYPE, Field("function", Custom(_read_function, "function", _FUNCTION.schema()), REQUIRED, "it"))
)
_NAMED: Final = Object(
    (_TYPE, Field("function", Custom(_read_named, "function", _NAMED_FUNCTION.schema()), REQUIRED, "it"))
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
            "`none`, `auto`, `required`, or a function's name in an object",
            asked((OneOf(_CHOICES), _NAMED)),
        ),
        None,
        "whether it calls: not at all, as it likes, at least once, that one; absent: `auto` with `tools`",
    ),
    Field("parallel_tool_calls", Boolean(), True, "more than one call in an answer"),
)
