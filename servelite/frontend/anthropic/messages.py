"""Anthropic's messages and their content blocks, as a chat's messages."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import String, check_names, shown
from servelite.frontend.prompts import MAX_MESSAGES
from servelite.frontend.shapes import Items, asked

ChatMessage = dict[str, Any]
_ROLES: Final = ("user", "assistant")
_BLOCKS: Final = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
_FIELDS: Final = {
    "text": ("text", "citations"),
    "tool_use": ("id", "name", "input", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
}
"""What a block of a type may have, beside `type` and `cache_control` (every prompt is cached)."""
_ID: Final = String(256)

_TEXT: Final = {"type": "text", "text": str, "citations?": Any, "cache_control?": Any}
_TEXTS: Final = (str, [_TEXT])
_RESULT: Final = {
    "type": "tool_result",
    "tool_use_id": _ID,
    "content?": _TEXTS,
    "is_error?": Any,
    "cache_control?": Any,
}
_OF_ASSISTANT: Final = (
    _TEXT,
    {"type": "tool_use", "id": _ID, "name": str, "input": dict, "caller?": Any, "cache_control?": Any},
    {"type": "thinking", "thinking": str, "signature?": Any, "cache_control?": Any},
    {"type": "redacted_thinking", "data?": Any, "cache_control?": Any},
)
_MESSAGE: Final = (
    {"role": "user", "content": (str, [(_TEXT, _RESULT)])},
    {"role": "assistant", "content": (str, [_OF_ASSISTANT])},
)
SYSTEM_SCHEMA: Final = asked(_TEXTS)
MESSAGES_SCHEMA: Final = Items(_MESSAGE, 1, MAX_MESSAGES).schema()


def read_system(path: str, value: Any) -> str:
    """The system prompt: a text, or text blocks; raises `APIError` (400)."""
    return value if isinstance(value, str) else _texts(path, value)


def read_messages(path: str, value: Any) -> list[ChatMessage]:
    """A chat's messages: turns of the same role that follow each other are one; raises `APIError` (400)."""
    if not isinstance(value, list) or not value:
        raise bad_request(f"{path} must be a list with at least one message, not {shown(value)}", path)
    if len(value) > MAX_MESSAGES:
        raise bad_request(f"{path} has {len(value)} messages; the limit is {MAX_MESSAGES}", path)
    messages: list[ChatMessage] = []
    for i, message in enumerate(value):
        _read_message(f"{path}[{i}]", message, messages)
    if not messages:
        raise bad_request(f"{path} has no content blocks", path)
    return messages


def _read_message(path: str, message: Any, messages: list[ChatMessage]) -> None:
    if not isinstance(message, dict):
        raise bad_request(f"{path} must be an object, not {shown(message)}", path)
    check_names(path, message, ("role", "content"))
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise bad_request(
            f"{path}.role is {shown(role)}; it must be one of: {', '.join(_ROLES)}", f"{path}.role"
        )
    if content is None:
        raise bad_request(f"{path}.content is missing", f"{path}.content", "missing_field")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for block_path, block in _blocks(f"{path}.content", content, _BLOCKS[role]):
        kind = block["type"]
        if kind == "tool_result":
            output = "" if block.get("content") is None else block["content"]
            text = output if isinstance(output, str) else _texts(f"{block_path}.content", output)
            call_id = _ID.read(f"{block_path}.tool_use_id", block.get("tool_use_id"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            continue
        turn = _turn(role, messages)
        if kind == "text":
            _join(turn, "content", _text(block_path, block, "text"))
        elif kind == "thinking":
            _join(turn, "reasoning_content", _text(block_path, block, "thinking"))
        elif kind == "tool_use":
            turn.setdefault("tool_calls", []).append(_call(block_path, block))


def _turn(role: str, messages: list[ChatMessage]) -> ChatMessage:
    """The message that a block of `role` belongs to."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": None if role == "assistant" else ""})
    return messages[-1]


def _join(turn: ChatMessage, name: str, text: str) -> None:
    turn[name] = f"{turn[name]}\n{text}" if turn.get(name) else text


def _call(path: str, block: dict[str, Any]) -> dict[str, Any]:
    for name, kind, words in (
        ("id", str, "a string"),
        ("name", str, "a string"),
        ("input", dict, "an object"),
    ):
        if not isinstance(block.get(name), kind):
            raise bad_request(
                f"{path}.{name} must be {words}, not {shown(block.get(name))}", f"{path}.{name}"
            )
    function = {"name": block["name"], "arguments": msgspec.json.encode(block["input"]).decode()}
    return {"id": _ID.read(f"{path}.id", block["id"]), "type": "function", "function": function}


def _texts(path: str, value: Any) -> str:
    return "\n".join([_text(where, block, "text") for where, block in _blocks(path, value, ("text",))])


def _blocks(path: str, value: Any, kinds: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Each block with its path."""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a string or a list of blocks, not {shown(value)}", path)
    read = []
    for i, block in enumerate(value):
        where = f"{path}[{i}]"
        if not isinstance(block, dict):
            raise bad_request(f"{where} must be an object, not {shown(block)}", where)
        kind = block.get("type")
        if kind not in kinds:
            raise bad_request(
                f"{where}.type is {shown(kind)}, which is not supported here: {', '.join(kinds)}",
                f"{where}.type",
                "unsupported_value",
            )
        check_names(where, block, (*_FIELDS[kind], "type", "cache_control"))
        read.append((where, block))
    return read


def _text(path: str, block: dict[str, Any], name: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise bad_request(f"{path}.{name} must be a string, not {shown(text)}", f"{path}.{name}")
    return text
