"""What a model is asked to continue: the messages of a chat, or prompts."""

from __future__ import annotations

import json
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import MAX_TOKEN_ID, Integer, OneOf, Only, String, shown
from servelite.frontend.shapes import Items, asked

MAX_MESSAGES: Final = 4096
MAX_PROMPTS: Final = 2048
MAX_CALLS: Final = 128  # of one message
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_OF_ROLE: Final = {
    "assistant": ("tool_calls", "reasoning_content", "reasoning", "parsed"),
    "tool": ("tool_call_id",),
}
"""What a message of a role may have beside role, content and name. `parsed` is what OpenAI's SDK read out of
an answer, and says nothing that the answer does not."""

Message = dict[str, Any]
"""Role and content, a text; name, `tool_call_id`, `reasoning_content` where given, texts too; and
`tool_calls`, in which arguments that are a JSON object's text have become that object."""
Prompt = str | list[int]
"""A text, or token IDs."""

_WORD: Final = String(256)
_TEXT: Final = String(1 << 24)
_CONTENT: Final = (str, [{"type": "text", "text": str}])
_FUNCTION: Final = {"name": _WORD, "arguments?": _TEXT, "parsed_arguments?": Any}
_CALL: Final = {"id?": _WORD, "type?": "function", "index?": Any, "function": _FUNCTION}
_ANY: Final = {"name?": _WORD, "*": Only((None, [], ""))}
_ASSISTANT: Final = {
    "role": "assistant",
    "content?": _CONTENT,
    "parsed?": Any,
    "reasoning?": _TEXT,
    "reasoning_content?": _TEXT,
    "tool_calls?": Items(_CALL, 0, MAX_CALLS),
}
_MESSAGE: Final = (
    _ANY | {"role": OneOf(tuple(role for role in ROLES if role not in _OF_ROLE)), "content": _CONTENT},
    _ANY | _ASSISTANT,
    _ANY | {"role": "tool", "content": _CONTENT, "tool_call_id": _WORD},
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
    known = ("role", "content", "name", *_OF_ROLE.get(role, ()))
    for name, value in message.items():
        # An answer of ours (or of OpenAI's) sent back as it came has more fields, all of them empty.
        if name not in known and value not in (None, [], ""):
            raise bad_request(
                f"{path}.{name[:64]} is not supported", f"{path}.{name[:64]}", "unsupported_value"
            )
    content = message.get("content")
    if content is None and role != "assistant":
        raise bad_request(f"{path}.content is missing", f"{path}.content", "missing_field")
    read: Message = {
        "role": role,
        "content": "" if content is None else _read_content(f"{path}.content", content),
    }
    if message.get("name") is not None:
        read["name"] = String(256).read(f"{path}.name", message["name"])
    if role == "tool":
        if message.get("tool_call_id") is None:
            raise bad_request(f"{path}.tool_call_id is missing", f"{path}.tool_call_id", "missing_field")
        read["tool_call_id"] = String(256).read(f"{path}.tool_call_id", message["tool_call_id"])
    for name in ("reasoning", "reasoning_content"):
        if role == "assistant" and message.get(name) is not None:
            read["reasoning_content"] = String(1 << 24).read(f"{path}.{name}", message[name])
    if role == "assistant" and message.get("tool_calls") not in (None, []):
        read["tool_calls"] = _read_calls(f"{path}.tool_calls", message["tool_calls"])
    return read


def _read_calls(path: str, value: Any) -> list[dict[str, Any]]:
    """The calls of an assistant's message, as they were answered."""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a list of calls, not {shown(value)}", path)
    if len(value) > MAX_CALLS:
        raise bad_request(f"{path} has {len(value)} calls; the limit is {MAX_CALLS}", path)
    return [_read_call(f"{path}[{i}]", call) for i, call in enumerate(value)]


def _read_call(path: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise bad_request(f"{path} must be a call of a function, not {shown(call)}", path)
    for place, where, names in (
        (path, call, ("id", "type", "function", "index")),
        (f"{path}.function", function, ("name", "arguments", "parsed_arguments")),
    ):
        for name in where:
            if name not in names and where[name] is not None:
                raise bad_request(
                    f"Unknown field {place}.{name[:64]}", f"{place}.{name[:64]}", "unknown_field"
                )
    name = String(256).read(f"{path}.function.name", function.get("name"))
    text = function.get("arguments")
    arguments = String(1 << 24).read(f"{path}.function.arguments", "" if text is None else text)
    read: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": _object(arguments)}}
    if call.get("id") is not None:
        read["id"] = String(256).read(f"{path}.id", call["id"])
    return read


def _object(text: str) -> dict[str, Any] | str:
    """Arguments as templates want them; what a model wrote that is no JSON object stays text."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


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


def _read_content(path: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{path} must be a string or a list of parts, not {shown(content)}", path)
    return "\n".join(_read_part(f"{path}[{i}]", part) for i, part in enumerate(content))


def _read_part(path: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise bad_request(f"{path} must be an object, not {shown(part)}", path)
    if part.get("type") != "text":
        raise bad_request(
            f"{path}.type is {shown(part.get('type'))}: this model takes only text parts",
            f"{path}.type",
            "unsupported_value",
        )
    for name in part:
        if name not in ("type", "text"):
            raise bad_request(f"Unknown field {path}.{name[:64]}", f"{path}.{name[:64]}", "unknown_field")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{path}.text must be a string, not {shown(part.get('text'))}", f"{path}.text")
    return str(part["text"])


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
