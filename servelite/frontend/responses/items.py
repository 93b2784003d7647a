"""The items of a Responses body's `input`, as a chat's messages."""

from __future__ import annotations

from typing import Any, Final

from servelite.frontend.errors import APIError, bad_request
from servelite.frontend.fields import OneOf, String, check_names, shown
from servelite.frontend.prompts import MAX_MESSAGES
from servelite.frontend.responses.tools import chat_name, text_arguments
from servelite.frontend.shapes import Items, asked

ChatMessage = dict[str, Any]
_ROLES: Final = ("system", "developer", "user", "assistant")
_TEXT_PARTS: Final = ("input_text", "output_text", "text")
_REASONING_PARTS: Final = ("reasoning_text", "text")
_BESIDE_TEXT: Final = ("annotations", "logprobs", "parsed", "prompt_cache_breakpoint")
_OF_CALLS: Final = ("type", "call_id", "name", "namespace", "id", "status", "caller")
_TAKEN: Final = "messages, reasoning, and calls of functions and custom tools with their outputs are"
_PHASES: Final = ("commentary", "final_answer")
_CALL_ID: Final = String(256)

_PART: Final = {f"{name}?": Any for name in _BESIDE_TEXT}
_CONTENT: Final = (
    str,
    [(_PART | {"type": OneOf(_TEXT_PARTS), "text": str}, _PART | {"type": "refusal", "refusal": str})],
)
_ITEM: Final = {"id?": Any, "status?": Any}
_OUTPUT: Final = _ITEM | {
    "call_id": _CALL_ID,
    "output": _CONTENT,
    "name?": Any,
    "namespace?": Any,
    "caller?": Any,
}
_CALL: Final = _ITEM | {"call_id": _CALL_ID, "name": str, "namespace?": str, "caller?": Any}
_REASONING: Final = {
    "type": "reasoning",
    "content?": [_PART | {"type": OneOf(_REASONING_PARTS), "text": str}],
    "summary?": [_PART | {"type": "summary_text", "text": str}],
    "encrypted_content?": Any,
}
_INPUT_ITEM: Final = (
    _ITEM | {"type?": "message", "role": OneOf(_ROLES), "content": _CONTENT, "phase?": OneOf(_PHASES)},
    _CALL | {"type": "function_call", "arguments": str, "parsed_arguments?": Any},
    _CALL | {"type": "custom_tool_call", "input": str},
    _OUTPUT | {"type": OneOf(("function_call_output", "custom_tool_call_output"))},
    _ITEM | _REASONING,
)
INPUT_SCHEMA: Final = asked((str, Items(_INPUT_ITEM, 1, MAX_MESSAGES)))


def read_input(path: str, value: Any) -> list[ChatMessage]:
    """The messages; each is a dict as `/v1/chat/completions` takes it. Raises `APIError` (400)."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise bad_request(
            f"{path} must be a string or a list with at least one item, not {shown(value)}", path
        )
    if len(value) > MAX_MESSAGES:
        raise bad_request(f"{path} has {len(value)} items; the limit is {MAX_MESSAGES}", path)
    reader = _Reader()
    for i, item in enumerate(value):
        reader.read(f"{path}[{i}]", item)
    return reader.finish()


class _Reader:
    """Puts together what a chat has in one message: an assistant's reasoning, text and calls."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._reasoning: list[str] = []

    def read(self, path: str, item: Any) -> None:
        if not isinstance(item, dict):
            raise bad_request(f"{path} must be an object, not {shown(item)}", path)
        kind = "message" if item.get("type") is None else item["type"]
        match kind:
            case "message":
                self._message(path, item)
            case "function_call":
                check_names(path, item, (*_OF_CALLS, "arguments", "parsed_arguments"))
                self._call(path, item, _string(path, item, "arguments"))
            case "custom_tool_call":
                check_names(path, item, (*_OF_CALLS, "input"))
                self._call(path, item, text_arguments(_string(path, item, "input")))
            case "function_call_output" | "custom_tool_call_output":
                check_names(path, item, (*_OF_CALLS, "output"))
                output = _content(f"{path}.output", item.get("output"))
                self._add({"role": "tool", "tool_call_id": _call_id(path, item), "content": output})
            case "reasoning":
                self._reason(path, item)
            case "item_reference":
                raise _unsupported(f"{path}.type", kind, "nothing is stored: send the item itself")
            case _:
                raise _unsupported(f"{path}.type", kind, _TAKEN)

    def finish(self) -> list[ChatMessage]:
        """Reasoning at the very end belongs to no message: nothing was said after it."""
        return self._messages

    def _add(self, message: ChatMessage) -> None:
        last = self._messages[-1] if self._messages else {}
        if message["role"] == "assistant" and self._reasoning:
            message["reasoning_content"] = "\n".join(self._reasoning)
        elif message["role"] == "assistant" and "tool_calls" in last:  # whose outputs are still to come
            last["content"] = "\n".join(filter(None, (last["content"], message["content"])))
            return
        self._reasoning = []
        self._messages.append(message)

    def _message(self, path: str, item: dict[str, Any]) -> None:
        check_names(path, item, ("type", "role", "content", "id", "status", "phase"))
        role, phase = item.get("role"), item.get("phase")
        if role not in _ROLES:
            raise bad_request(
                f"{path}.role is {shown(role)}; it must be one of: {', '.join(_ROLES)}", f"{path}.role"
            )
        if phase is not None and phase not in _PHASES:
            raise bad_request(
                f"{path}.phase is {shown(phase)}; it must be one of: {', '.join(_PHASES)}", f"{path}.phase"
            )
        self._add({"role": role, "content": _content(f"{path}.content", item.get("content"))})

    def _call(self, path: str, item: dict[str, Any], arguments: str) -> None:
        namespace = None if item.get("namespace") is None else _string(path, item, "namespace")
        function = {"name": chat_name(_string(path, item, "name"), namespace), "arguments": arguments}
        call = {"id": _call_id(path, item), "type": "function", "function": function}
        last = self._messages[-1] if self._messages else None
        if last is not None and last["role"] == "assistant" and not self._reasoning:
            last.setdefault("tool_calls", []).append(call)
        else:
            self._add({"role": "assistant", "content": None, "tool_calls": [call]})

    def _reason(self, path: str, item: dict[str, Any]) -> None:
        """What the model thought before what follows; a summary where there is nothing else."""
        check_names(path, item, ("type", "id", "summary", "content", "encrypted_content", "status"))
        texts = [
            _parts(f"{path}.{name}", item[name], kinds)
            for name, kinds in (("content", _REASONING_PARTS), ("summary", ("summary_text",)))
            if item.get(name) is not None
        ]
        self._reasoning += list(filter(None, texts))[:1]


def _call_id(path: str, item: dict[str, Any]) -> str:
    if item.get("call_id") is None:
        raise bad_request(f"{path}.call_id is missing", f"{path}.call_id", "missing_field")
    return _CALL_ID.read(f"{path}.call_id", item["call_id"])


def _string(path: str, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{path}.{name} must be a string, not {shown(value)}", f"{path}.{name}")
    return value


def _content(path: str, value: Any) -> str:
    if value is None:
        raise bad_request(f"{path} is missing", path, "missing_field")
    return value if isinstance(value, str) else _parts(path, value, _TEXT_PARTS)


def _parts(path: str, value: Any, kinds: tuple[str, ...]) -> str:
    """The texts of content parts, joined as a chat's are."""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be a string or a list of parts, not {shown(value)}", path)
    texts = []
    for i, part in enumerate(value):
        where = f"{path}[{i}]"
        if not isinstance(part, dict):
            raise bad_request(f"{where} must be an object, not {shown(part)}", where)
        kind = part.get("type")
        if kind == "refusal" and kinds is _TEXT_PARTS:
            name = "refusal"
        elif kind in kinds:
            name = "text"
        else:
            raise _unsupported(f"{where}.type", kind, "this model takes only text: " + ", ".join(kinds))
        check_names(where, part, ("type", name, *_BESIDE_TEXT))
        texts.append(_string(where, part, name))
    return "\n".join(texts)


def _unsupported(path: str, value: Any, advice: str) -> APIError:
    return bad_request(
        f"{path} is {shown(value)}, which is not supported: {advice}", path, "unsupported_value"
    )
