"""Anthropic's messages and their content blocks, as a chat's messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from servelite.frontend.anthropic.tagged import ANY, Fields, Tagged
from servelite.frontend.errors import bad_request
from servelite.frontend.fields import Boolean, JSONObject, OneOf, Only, Schema, String, shown
from servelite.frontend.prompts import MAX_MESSAGES
from servelite.frontend.shapes import Items, asked

ChatMessage = dict[str, Any]
_BILLING: Final = "x-anthropic-billing-header:"
_ID: Final = String(256)  # or a name
_TEXT: Final = String(1 << 24)
_CACHED: Final[Fields] = {"cache_control?": ANY}  # every prompt is


@dataclass(frozen=True)
class _Content:
    """A text or a list of blocks, read as a list of blocks."""

    blocks: Tagged

    def read(self, path: str, value: Any) -> list[dict[str, Any]]:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if not isinstance(value, list):
            raise bad_request(f"{path} must be a string or a list of blocks, not {shown(value)}", path)
        return [self.blocks.read(f"{path}[{i}]", block) for i, block in enumerate(value)]

    def describe(self) -> str:
        return "string, or list of blocks"

    def schema(self) -> Schema:
        return asked((str, [self.blocks]))


_TEXT_BLOCK: Final[Fields] = _CACHED | {"text": _TEXT, "citations?": ANY}
_TEXTS: Final = _Content(Tagged("type", {"text": _TEXT_BLOCK}))
_SOURCE: Final = Tagged(
    "type",
    {"text": {"media_type?": OneOf(("text/plain",)), "data": _TEXT}, "content": {"content": _TEXTS}},
)
_QUOTED: Final[Fields] = _CACHED | {"citations?": Only(({"enabled": False},))}  # nothing is quoted
_PLAIN: Final[dict[str, Fields]] = {
    "text": _TEXT_BLOCK,
    "document": _QUOTED | {"source": _SOURCE, "title?": _TEXT, "context?": _TEXT},
    "search_result": _QUOTED | {"content": _TEXTS, "source": _TEXT, "title": _TEXT},
    "tool_reference": _CACHED | {"tool_name": _TEXT},
}
_RESULT: Final[Fields] = {
    "tool_use_id": _ID,
    "content?": _Content(Tagged("type", _PLAIN)),
    "is_error?": Boolean(),
}
_OF_USER: Final[dict[str, Fields]] = _PLAIN | {"tool_result": _CACHED | _RESULT}
_OF_ASSISTANT: Final[dict[str, Fields]] = {
    "text": _TEXT_BLOCK,
    "tool_use": _CACHED | {"id": _ID, "name": _ID, "input": JSONObject(64), "caller?": ANY},
    "thinking": _CACHED | {"thinking": _TEXT, "signature?": ANY},
    "redacted_thinking": _CACHED | {"data?": ANY},
}
_CLEAR_AT: Final = OneOf(("next_user_message", "never"))
_MESSAGE: Final = Tagged(
    "role",
    {
        "user": {"content": _Content(Tagged("type", _OF_USER))},
        "assistant": {"content": _Content(Tagged("type", _OF_ASSISTANT))},
        "system": {"content": _TEXTS, "clear_at?": _CLEAR_AT},
    },
)
SYSTEM_SCHEMA: Final = _TEXTS.schema()
MESSAGES_SCHEMA: Final = Items(_MESSAGE, 1, MAX_MESSAGES).schema()


@dataclass(frozen=True)
class Conversation:
    """A chat's messages but for its system prompt, and what was said as the system amid them.

    Chat templates have one place for the system, which is the beginning; many refuse it elsewhere.
    """

    turns: list[ChatMessage]
    system: list[str]


def read_system(path: str, value: Any) -> str:
    """The system prompt: a text, or text blocks; raises `APIError` (400).

    The line in which Claude Code tells Anthropic who pays is left out: it is another one in each request,
    so that no prompt would begin like the one before it.
    """
    texts = [block["text"] for block in _TEXTS.read(path, value)]
    return "\n".join([text for text in texts if not text.startswith(_BILLING)])


def read_messages(path: str, value: Any) -> Conversation:
    """Turns of the same role that follow each other are one message; raises `APIError` (400)."""
    if not isinstance(value, list) or not value:
        raise bad_request(f"{path} must be a list with at least one message, not {shown(value)}", path)
    if len(value) > MAX_MESSAGES:
        raise bad_request(f"{path} has {len(value)} messages; the limit is {MAX_MESSAGES}", path)
    messages = [_MESSAGE.read(f"{path}[{i}]", message) for i, message in enumerate(value)]
    last_user = max([i for i, message in enumerate(messages) if message["role"] == "user"], default=-1)
    turns: list[ChatMessage] = []
    system: list[str] = []
    for i, message in enumerate(messages):
        if message["role"] == "system":
            if message["clear_at"] != "next_user_message" or i > last_user:
                system.append(_text(message["content"]))
            continue
        for block in message["content"]:
            _take(block, message["role"], turns)
    if not turns:
        raise bad_request(f"{path} has no content blocks of the user or the assistant", path)
    return Conversation(turns, system)


def _take(block: dict[str, Any], role: str, turns: list[ChatMessage]) -> None:
    """Add a block of a message of that role."""
    kind = block["type"]
    if kind == "tool_result":
        text = ("Error: " if block["is_error"] else "") + _text(block["content"] or ())
        turns.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        return
    if not turns or turns[-1]["role"] != role:
        turns.append({"role": role, "content": None if role == "assistant" else ""})
    turn = turns[-1]
    if kind == "thinking":
        _join(turn, "reasoning_content", block["thinking"])
    elif kind == "tool_use":
        function = {"name": block["name"], "arguments": block["input"]}
        call = {"id": block["id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    elif kind != "redacted_thinking":
        _join(turn, "content", _text([block]))


def _join(turn: ChatMessage, name: str, text: str) -> None:
    turn[name] = f"{turn[name]}\n{text}" if turn.get(name) else text


def _text(blocks: Iterable[dict[str, Any]]) -> str:
    """What stands in blocks that are texts, or can be told as such."""
    texts: list[str | None] = []
    for block in blocks:
        match block["type"]:
            case "text":
                texts.append(block["text"])
            case "tool_reference":
                texts.append(block["tool_name"])
            case "search_result":
                texts += block["title"], block["source"], _text(block["content"])
            case "document":
                source = block["source"]
                data = source["data"] if source["type"] == "text" else _text(source["content"])
                texts += block["title"], block["context"], data
    return "\n".join([text for text in texts if text is not None])
