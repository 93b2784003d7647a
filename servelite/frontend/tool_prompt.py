"""Tools and calls as a chat template wants them, or, where it knows none, written into the messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from servelite.frontend.prompts import Message
from servelite.tokenizer.chat_template import Rendered, TemplateRefusal

_KNOWS_TOOLS: Final = re.compile(r"\btools\b")
_KNOWS_CALLS: Final = re.compile(r"\btool_calls\b")
_NEEDLE: Final = "needle-of-the-probe"
_PROBE: Final[list[Message]] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "f", "arguments": {"key": _NEEDLE}},
            }
        ],
    },
]


class ToolPrompt:
    """What one chat template has to be given."""

    def __init__(self, source: str, render: Callable[..., Rendered], *, declare: bool) -> None:
        """Look at a template.

        Args:
            source: its text.
            render: writes it out; tried on a call.
            declare: where it knows no tools, a message declares them.
        """
        self._declares = declare and _KNOWS_TOOLS.search(source) is None
        self._knows_calls = _KNOWS_CALLS.search(source) is not None
        self._wants_text = self._knows_calls and not _takes_objects(render)

    def fit(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """The messages that the template is given; `tools` it is given beside them."""
        fitted = list(messages)
        if self._knows_calls:
            if self._wants_text:
                fitted = [_with_text_arguments(message) for message in fitted]
        else:
            fitted = [_without_calls(message) for message in fitted]
        if tools and self._declares:
            fitted = _with_declarations(fitted, tools)
        return fitted


def _takes_objects(render: Callable[..., Rendered]) -> bool:
    """Whether the template writes arguments that are an object as JSON; else it wants their text."""
    for messages in (_PROBE, [_with_text_arguments(message) for message in _PROBE]):
        try:
            text = render(messages, add_generation_prompt=False).text
        except TemplateRefusal:
            continue
        if f"'{_NEEDLE}'" not in text and _NEEDLE in text:
            return messages is _PROBE
    return True


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _with_text_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    as_text = [
        call | {"function": call["function"] | {"arguments": _json(call["function"]["arguments"])}}
        for call in calls
    ]
    return message | {"tool_calls": as_text}


def _without_calls(message: Message) -> Message:
    """Calls and their results as text, in the form that `_with_declarations` asks for."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        function = call["function"]
        body = f'{{"name": {json.dumps(function["name"])}, "arguments": {_json(function["arguments"])}}}'
        texts.append(f"<tool_call>\n{body}\n</tool_call>")
    return {key: value for key, value in message.items() if key != "tool_calls"} | {
        "content": "\n".join(texts)
    }


def _with_declarations(messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """With a system message that declares the tools and says how to call them (Hermes' form)."""
    declared = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "These functions can be called, one JSON declaration a line:\n"
        f"<tools>\n{declared}\n</tools>\n"
        "To call one, write its name and arguments as JSON in this form, once for each call:\n"
        '<tool_call>\n{"name": "the name", "arguments": {"an argument": "its value"}}\n</tool_call>'
    )
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [first | {"content": f"{first['content']}\n\n{text}".lstrip()}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
