"""What a model is asked to continue: the messages of a chat, or prompts."""

from __future__ import annotations

import json
from typing import Any, Final

from servelite.frontend.errors import APIError, bad_request
from servelite.frontend.fields import (
    MAX_TOKEN_ID,
    Integer,
    JSONObject,
    OneOf,
    Only,
    String,
    read_object,
    shown,
)
from servelite.frontend.shapes import Items, asked

MAX_MESSAGES: Final = 4096
MAX_PROMPTS: Final = 2048
MAX_CALLS: Final = 128  # of one message
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")

NOTES: Final = ("cache_control", "prompt_cache_breakpoint", "provider_specific_fields", "extra_content")
"""What other servers and libraries leave on messages, parts, calls and tools: accepted without effect."""
_OF_ANSWERS: Final = (
    *("parsed", "annotations", "reasoning_details", "reasoning_items", "thinking_blocks"),
    *("type", "function"),  # a copy of a call's, by a library's mistake
)
"""Of an assistant's message, accepted without effect: what repeats or annotates it."""
_OF_PARTS: Final = ("annotations", "role")
"""Of a part of an assistant's message, likewise."""
_OF_ROLE: Final = {
    "assistant": ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal", *_OF_ANSWERS),
    "tool": ("tool_call_id",),
}
"""What a message of a role may have beside role, content, name and `NOTES`."""
_KNOWN: Final = {role: {"role", "content", "name", *_OF_ROLE.get(role, ()), *NOTES} for role in ROLES}
_REQUIRED: Final = {"assistant": (), "tool": ("content", "tool_call_id"), "function": ("content", "name")}
_REFUSED: Final = ("audio", "images")  # unless empty
_EMPTY: Final[tuple[Any, ...]] = (None, [], "")

Message = dict[str, Any]
"""Role and content, a text; name, `tool_call_id`, `reasoning_content` where given, texts too; and
`tool_calls`, in which arguments that are a JSON object's text have become that object."""
Prompt = str | list[int]
"""A text, or token IDs."""

_WORD: Final = String(256)
_TEXT: Final = String(1 << 24)
_ARGUMENTS: Final = JSONObject(64)

_NOTED: Final = {f"{name}?": Any for name in NOTES}
_PART: Final = _NOTED | {"type": "text", "text": str}
_CONTENT: Final = (str, [_PART])
_OF_PART: Final = _NOTED | {f"{name}?": Any for name in _OF_PARTS}
_SAID: Final = (str, [tuple(_OF_PART | {"type": kind, kind: str} for kind in ("text", "refusal"))])
_FUNCTION: Final = _NOTED | {"name": _WORD, "arguments?": (_TEXT, _ARGUMENTS), "parsed_arguments?": Any}
_CALL: Final = _NOTED | {"id?": _WORD, "type?": "function", "index?": Any, "function": _FUNCTION}
_ANY: Final = _NOTED | {"name?": _WORD, "*": Only(_EMPTY)}
_ASSISTANT: Final = {
    "role": "assistant",
    "content?": _SAID,
    "refusal?": _TEXT,
    "reasoning?": _TEXT,
    "reasoning_content?": _TEXT,
    "tool_calls?": Items(_CALL, 0, MAX_CALLS),
    "function_call?": _FUNCTION,
} | {f"{name}?": Any for name in _OF_ANSWERS}
_MESSAGE: Final = (
    _ANY | {"role": OneOf(("system", "developer", "user")), "content": _CONTENT},
    _ANY | _ASSISTANT,
    _ANY | {"role": "tool", "content": _CONTENT, "tool_call_id": _WORD},
    _ANY | {"role": "function", "content": _CONTENT, "name": _WORD},
)
_PROMPT: Final = (str, Items(Integer(0, MAX_TOKEN_ID), 1))
MESSAGES_SCHEMA: Final = Items(_MESSAGE, 1, MAX_MESSAGES).schema()
PROMPTS_SCHEMA: Final = asked((*_PROMPT, Items(_PROMPT, 1, MAX_PROMPTS)))


def read_messages(path: str, value: Any) -> list[Message]:
    """The messages of a chat: each a role and its text (content parts joined by line breaks)."""
    if not isinstance(value, list) or not value:
        raise bad_request(f"{path} must be a list with at least one message, not {shown(value)}", path)
    if len(value) > MAX_MESSAGES:
        raise bad_request(f"{path} has {len(value)} messages; the limit is {MAX_MESSAGES}", path)
    return [_read_message(f"{path}[{i}]", message) for i, message in enumerate(value)]


def _read_message(path: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise bad_request(f"{path} must be an object, not {shown(message)}", path)
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(
            f"{path}.role is {shown(role)}; it must be one of: {', '.join(ROLES)}", f"{path}.role"
        )
    given = _given(path, message, role)
    said = role == "assistant"
    read: Message = {
        "role": role,
        "content": _read_content(f"{path}.content", given.get("content", ""), said),
    }
    if "refusal" in given:
        refusal = _TEXT.read(f"{path}.refusal", given["refusal"])
        read["content"] = "\n".join(filter(None, (read["content"], refusal)))
    for name in ("name", "tool_call_id"):
        if name in given:
            read[name] = _WORD.read(f"{path}.{name}", given[name])
    for name in ("reasoning", "reasoning_content"):
        if name in given:
            read["reasoning_content"] = _TEXT.read(f"{path}.{name}", given[name])
    if given.get("tool_calls", []) != []:
        read["tool_calls"] = _read_calls(f"{path}.tool_calls", given["tool_calls"])
    elif "function_call" in given:
        function = _read_function(f"{path}.function_call", given["function_call"])
        read["tool_calls"] = [{"type": "function", "function": function, "id": function["name"]}]
    if role == "function":  # the older name of a tool; its results have the function's name and no ID
        read |= {"role": "tool", "tool_call_id": read["name"]}
    return read


def _given(path: str, message: Message, role: str) -> Message:
    """The fields that a message has. An answer that is sent back as it came has more, all of them empty."""
    known = _KNOWN[role]
    if not known.issuperset(message):
        message = {name: one for name, one in message.items() if name in known or one not in _EMPTY}
        for name in _REFUSED:
            if name in message:
                where = f"{path}.{name}"
                raise bad_request(f"{where} is not supported: messages are text", where, "unsupported_value")
    return read_object(path, message, known, _REQUIRED.get(role, ("content",)))


def _read_calls(path: str, value: Any) -> list[dict[str, Any]]:
    """The calls of an assistant's message, as they were answered."""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a list of calls, not {shown(value)}", path)
    if len(value) > MAX_CALLS:
        raise bad_request(f"{path} has {len(value)} calls; the limit is {MAX_CALLS}", path)
    return [_read_call(f"{path}[{i}]", call) for i, call in enumerate(value)]


def _read_call(path: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") not in (None, "function"):
        raise bad_request(f"{path} must be a call of a function, not {shown(call)}", path)
    given = read_object(path, call, ("id", "type", "function", "index", *NOTES))
    read = {"type": "function", "function": _read_function(f"{path}.function", function)}
    if "id" in given:
        read["id"] = _WORD.read(f"{path}.id", given["id"])
    return read


def _read_function(path: str, value: Any) -> dict[str, Any]:
    given = read_object(path, value, ("name", "arguments", "parsed_arguments", *NOTES), ("name",))
    name, arguments = _WORD.read(f"{path}.name", given["name"]), given.get("arguments", "")
    if isinstance(arguments, dict):
        return {"name": name, "arguments": _ARGUMENTS.read(f"{path}.arguments", arguments)}
    return {"name": name, "arguments": _object(_TEXT.read(f"{path}.arguments", arguments))}


def _object(text: str) -> dict[str, Any] | str:
    """Arguments as templates want them; what a model wrote that is no JSON object stays text. Halves of
    surrogate pairs, which a model may write and which have no UTF-8, become question marks."""
    try:
        read = json.loads(text or "{}")
        if "\\u" in text:
            read = json.loads(json.dumps(read, ensure_ascii=False).encode(errors="replace"))
        return _ARGUMENTS.read("", read)
    except (ValueError, RecursionError, APIError):
        return text


def numbered(param: str, i: int, count: int) -> str:
    """The field of the `i`-th of so many prompts."""
    return param if count == 1 else f"{param}[{i}]"


def text_size(value: Any) -> int:
    """Characters of all texts in messages or tools."""
    size = 0
    level = [value]
    while level:
        one = level.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            size += sum(map(len, one))
            level += one.values()
        elif isinstance(one, (list, tuple)):
            level += one
    return size


def _read_content(path: str, content: Any, said: bool) -> str:
    """`said`: by the assistant, who may have refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{path} must be a string or a list of parts, not {shown(content)}", path)
    return "\n".join(_read_part(f"{path}[{i}]", part, said) for i, part in enumerate(content))


def _read_part(path: str, part: Any, said: bool) -> str:
    kinds = ("text", "refusal") if said else ("text",)
    kind: Any = part.get("type") if isinstance(part, dict) else kinds[0]
    if kind not in kinds:
        raise bad_request(
            f"{path}.type is {shown(kind)}: this model takes only text parts",
            f"{path}.type",
            "unsupported_value",
        )
    given = read_object(path, part, ("type", kind, *NOTES, *(_OF_PARTS if said else ())), (kind,))
    if not isinstance(given[kind], str):
        raise bad_request(f"{path}.{kind} must be a string, not {shown(given[kind])}", f"{path}.{kind}")
    return str(given[kind])


def read_prompts(path: str, value: Any) -> list[Prompt]:
    """One prompt or several: a text, token IDs, or a list of either."""
    if isinstance(value, list) and value and all(isinstance(item, (str, list)) for item in value):
        if len(value) > MAX_PROMPTS:
            raise bad_request(f"{path} has {len(value)} prompts; the limit is {MAX_PROMPTS}", path)
        return [read_prompt(f"{path}[{i}]", item) for i, item in enumerate(value)]
    return [read_prompt(path, value)]


def read_prompt(path: str, value: Any) -> Prompt:
    """One prompt: a text or token IDs."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise bad_request(f"{path} must be a string or a list of token IDs, not {shown(value)}", path)
