"""What a model is asked to continue: the messages of a chat, or prompts."""

from __future__ import annotations

from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import String, shown

MAX_MESSAGES: Final = 4096
MAX_PROMPTS: Final = 1024
ROLES: Final = ("system", "developer", "user", "assistant")

Message = dict[str, str]
"""Role, content, and name where given."""
Prompt = str | list[int]
"""A text, or token IDs."""


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
    for name, value in message.items():
        # An answer of ours (or of OpenAI's) sent back as it came has more fields, all of them empty.
        if name not in ("role", "content", "name") and value not in (None, [], ""):
            raise bad_request(
                f"{path}.{name[:64]} is not supported", f"{path}.{name[:64]}", "unsupported_value"
            )
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(
            f"{path}.role is {shown(role)}; it must be one of: {', '.join(ROLES)}", f"{path}.role"
        )
    content = message.get("content")
    if content is None and role != "assistant":
        raise bad_request(f"{path}.content is missing", f"{path}.content", "missing_field")
    read = {"role": role, "content": "" if content is None else _read_content(f"{path}.content", content)}
    if message.get("name") is not None:
        read["name"] = String(256).read(f"{path}.name", message["name"])
    return read


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
