"""A Responses body's tools, and the form of its text, as a chat's: the same things, one level flatter.

A custom tool, which takes any text, is a function with that text as its only argument. The tools of a
namespace are tools whose names in the chat begin with the namespace's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import (
    REQUIRED,
    Custom,
    Field,
    Harmless,
    Object,
    OneOf,
    Only,
    String,
    check_names,
    read_object,
    shown,
    unsupported_kind,
)
from servelite.frontend.shapes import Items, asked
from servelite.frontend.tools import FUNCTION_FIELDS, MAX_TOOLS

_FORMAT: Final = ("name", "description", "schema", "strict")
_CHOICES: Final = ("none", "auto", "required")
_MODES: Final = ("auto", "required")  # of allowed tools
_CALLED: Final = ("function", "custom")
KINDS: Final = (*_CALLED, "namespace")
_CALLERS: Final = (["direct"], ["direct", "programmatic"], ["programmatic", "direct"])
_CODEX: Final = {
    "web_search": 'web_search = "disabled"',
    "image_generation": "features.image_generation = false",
}
"""Settings of Codex, which declares these tools unasked."""
_NAME: Final = FUNCTION_FIELDS[0]
TEXT: Final = "input"  # a custom tool's only argument
_ONLY_TEXT: Final = {
    "type": "object",
    "properties": {TEXT: {"type": "string"}},
    "required": [TEXT],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Tool:
    """A tool that may be called.

    Attributes:
        kind: function or custom.
        function: what a chat's `tools` say of it.
        place: of its declaration in the body.
    """

    kind: str
    name: str
    namespace: str | None
    function: dict[str, Any]
    place: str


def chat_name(name: str, namespace: str | None) -> str:
    """What a tool is called in the chat."""
    return name if namespace is None else f"{namespace}__{name}"


def text_arguments(text: str) -> str:
    """The input of a custom tool as a function's arguments."""
    return json.dumps({TEXT: text}, ensure_ascii=False)


def _read_form(path: str, value: Any) -> str:
    """What the model is told of a custom tool's input, where its form may be unenforced."""
    form = read_object(path, value, ("type", "syntax", "definition"), ("type",))
    if form["type"] == "text":
        return ""
    unsupported_kind(f"{path}.type", form["type"], "the input of a custom tool is free text")
    return f"\n\nThe form of its input ({form.get('syntax')}):\n{form.get('definition')}"


def _list(path: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a list of tools, not {shown(value)}", path)
    return value


def _type(kind: str) -> Field:
    return Field("type", OneOf((kind,)), REQUIRED, "what it is")


_MORE: Final = (
    Field("defer_loading", Only((False, True)), None, "accepted: every tool is there from the start"),
    Field("allowed_callers", Only(_CALLERS), None, "only the model calls"),
    Field("async", Only((False,)), None, "a call waits for its output"),
)
_FUNCTION: Final = Object(
    (
        _type("function"),
        *FUNCTION_FIELDS,
        *_MORE,
        Field("output_schema", Harmless(), None, "accepted, without effect"),
    )
)
_CUSTOM: Final = Object(
    (
        _type("custom"),
        *FUNCTION_FIELDS[:2],
        *_MORE,
        Field("format", Custom(_read_form, "text", asked({"type": "text"})), None, "of its input"),
    )
)
_INNER: Final = Items((_FUNCTION, _CUSTOM), 0, MAX_TOOLS)
_NAMESPACE: Final = Object(
    (
        _type("namespace"),
        _NAME,
        Field("description", String(1 << 20), None, "what its tools do, for the model"),
        Field(
            "tools", Custom(_list, "list of tools", _INNER.schema()), REQUIRED, "functions and custom tools"
        ),
    )
)
TOOLS_SCHEMA: Final = Items((_FUNCTION, _CUSTOM, _NAMESPACE), 0, MAX_TOOLS).schema()
_NAMED: Final = {"type": OneOf(_CALLED), "name": str, "namespace?": str}
TOOL_CHOICE_SCHEMA: Final = asked(
    (
        OneOf(_CHOICES),
        _NAMED,
        {
            "type": "allowed_tools",
            "mode": OneOf(_MODES),
            "tools": [(_NAMED, {"type": "namespace", "name": str})],
        },
    )
)
_JSON_SCHEMA: Final = {
    "type": "json_schema",
    "name": str,
    "schema": dict,
    "description?": str,
    "strict?": bool,
}
FORMAT_SCHEMA: Final = asked(({"type": OneOf(("text", "json_object"))}, _JSON_SCHEMA))


def read_tools(path: str, value: Any) -> list[Tool]:
    """The tools, those of namespaces among them; raises `APIError` (400)."""
    tools = list(_tools(path, value, None))
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"{path} has {len(tools)} tools; the limit is {MAX_TOOLS}", path)
    names: set[str] = set()
    for tool in tools:
        name = tool.function["name"]
        if name in names:
            raise bad_request(f"{tool.place}.name {name!r} is there twice", f"{tool.place}.name")
        names.add(name)
    return tools


def _tools(path: str, value: Any, namespace: str | None) -> Iterable[Tool]:
    for i, given in enumerate(_list(path, value)):
        place = f"{path}[{i}]"
        kind = given.get("type") if isinstance(given, dict) else "function"
        if kind == "namespace" and namespace is None:
            yield from _in_namespace(place, given)
        elif kind in _CALLED:
            yield _tool(place, kind, given, namespace)
        else:
            setting = _CODEX.get(str(kind))
            advice = f"; Codex leaves it out with {setting} in its config.toml" if setting else ""
            unsupported_kind(f"{place}.type", kind, f"functions and custom tools are{advice}")


def _in_namespace(place: str, given: Any) -> list[Tool]:
    """Its tools; the first one's description begins with its own, which a chat has no place for."""
    read = _NAMESPACE.read(place, given)
    tools = list(_tools(f"{place}.tools", read["tools"], read["name"]))
    if tools and read["description"]:
        first = tools[0].function
        first["description"] = f"{read['description']}\n\n{first.get('description', '')}"
    return tools


def _tool(place: str, kind: str, given: Any, namespace: str | None) -> Tool:
    read = (_FUNCTION if kind == "function" else _CUSTOM).read(place, given)
    if kind == "custom":
        read["description"] = (read["description"] or "") + (read["format"] or "") or None
        read["parameters"] = _ONLY_TEXT
    name = _NAME.type.read(f"{place}.name", chat_name(read["name"], namespace))
    function = {f.name: read[f.name] for f in FUNCTION_FIELDS if read.get(f.name) is not None}
    return Tool(kind, read["name"], namespace, function | {"name": name}, place)


def read_tool_choice(path: str, value: Any) -> str | dict[str, Any]:
    """What it says, which `choose` holds against the tools; raises `APIError` (400)."""
    if isinstance(value, str) and value in _CHOICES:
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in _CALLED:
        return _named(path, value)
    if kind != "allowed_tools":
        raise bad_request(
            f"{path} is {shown(value)}; it must be none, auto, required, or an object with type function, "
            "custom or allowed_tools",
            path,
        )
    read = read_object(path, value, ("type", "mode", "tools"), ("mode", "tools"))
    OneOf(_MODES).read(f"{path}.mode", read["mode"])
    allowed = []
    for i, one in enumerate(_list(f"{path}.tools", read["tools"])):
        place = f"{path}.tools[{i}]"
        if isinstance(one, dict) and one.get("type") not in KINDS:
            unsupported_kind(f"{place}.type", one.get("type"), "functions and custom tools are")
        else:
            allowed.append(_named(place, one))
    return read | {"tools": allowed}


def _named(path: str, value: Any) -> dict[str, Any]:
    needed = ("type", "name")
    is_namespace = isinstance(value, dict) and value.get("type") == "namespace"
    read = read_object(path, value, needed if is_namespace else (*needed, "namespace"), needed)
    for name in ("name", "namespace"):
        String(256).read(f"{path}.{name}", read.get(name, ""))
    return read


def choose(
    choice: str | dict[str, Any] | None, tools: Sequence[Tool]
) -> tuple[Sequence[Tool], str | dict[str, Any] | None]:
    """The tools that may be called, and a chat's `tool_choice`; raises `APIError` (400)."""
    if not isinstance(choice, dict):
        return tools, choice
    if choice["type"] != "allowed_tools":
        found = _found(choice, tools, "tool_choice")[0].function["name"]
        return tools, {"type": "function", "function": {"name": found}}
    allowed = [
        tool
        for i, one in enumerate(choice["tools"])
        for tool in _found(one, tools, f"tool_choice.tools[{i}]")
    ]
    return [tool for tool in tools if tool in allowed], choice["mode"]


def _found(named: dict[str, Any], tools: Sequence[Tool], path: str) -> list[Tool]:
    """Without a namespace, the name is that of a tool in none, or else of one in any."""
    kind, name, namespace = named["type"], named["name"], named.get("namespace")
    if kind == "namespace":
        found = [tool for tool in tools if tool.namespace == name]
    else:
        alike = [tool for tool in tools if (tool.kind, tool.name) == (kind, name)]
        exact = [tool for tool in alike if tool.namespace == namespace]
        found = exact if exact or namespace is not None else alike
        if len(found) > 1:
            text = f"{path} names the {kind} {shown(name)}, which several namespaces have; give its namespace"
            raise bad_request(text, path)
    if not found:
        raise bad_request(f"{path} names the {kind} {shown(name)}, which is not among the tools", path)
    return found


def read_format(path: str, value: Any) -> dict[str, Any]:
    """A chat's `response_format`; raises `APIError` (400)."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("text", "json_object"):
        check_names(path, value, ("type",))
        return {"type": kind}
    if kind == "json_schema":
        read = read_object(path, value, (*_FORMAT, "type"))
        del read["type"]
        return {"type": kind, "json_schema": read}
    raise bad_request(
        f"{path} is {shown(value)}; it must be an object with type text, json_object or json_schema", path
    )
