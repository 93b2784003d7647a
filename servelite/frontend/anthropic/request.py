"""A `/v1/messages` body as a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from servelite.frontend.anthropic.answer import MessageTranslation
from servelite.frontend.anthropic.fields import COUNT_FIELDS, MESSAGES_FIELDS, PASSED_ON
from servelite.frontend.anthropic.tools import ToolChoice
from servelite.frontend.fields import read_fields
from servelite.frontend.protocol import BodyRules, ChatRequest, read_chat

NAMES: Final = (
    ("max_completion_tokens", "max_tokens"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("parameters", "input_schema"),
    (".function.", "."),
)
"""Names in a chat's errors, and what they are here."""


def read_message_request(body: Any, rules: BodyRules) -> MessageTranslation:
    """A decoded JSON body; raises `APIError` (400) naming the field."""
    values = read_fields(MESSAGES_FIELDS, body, rules.defaults, rules.unknown)
    chat = _prompt(values) | {f.name: body[f.name] for f in PASSED_ON if body.get(f.name) is not None}
    chat |= {"max_completion_tokens": values["max_tokens"], "stop": list(values["stop_sequences"])}
    if values["stream"]:  # its first event tells the prompt's length
        options = {"include_usage": True, "continuous_usage_stats": True}
        chat |= {"stream": True, "stream_options": options}
    if values["thinking"] is not None and rules.limits_thinking:
        chat["thinking_token_budget"] = values["thinking"].budget
    return MessageTranslation(read_chat(chat, rules))


def read_count(body: Any, rules: BodyRules) -> ChatRequest:
    """A decoded JSON body of `/v1/messages/count_tokens`; raises `APIError` (400) naming the field."""
    values = read_fields(COUNT_FIELDS, body, rules.defaults, rules.unknown)
    return read_chat(_prompt(values), rules)


def _prompt(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of a chat's body decides the prompt and the answer's form."""
    system = [] if values["system"] is None else [{"role": "system", "content": values["system"]}]
    messages = values["messages"]
    chat: dict[str, Any] = {"model": values["model"], "messages": system + messages}
    last = messages[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        chat["continue_final_message"] = True  # Anthropic's way to say how the answer begins
    if values["tools"]:
        chat["tools"] = values["tools"]
    choice: ToolChoice | None = values["tool_choice"]
    if choice is not None:
        chat |= {"tool_choice": choice.choice, "parallel_tool_calls": choice.parallel}
    kwargs = dict(values["chat_template_kwargs"] or {})
    if values["thinking"] is not None:
        kwargs["enable_thinking"] = values["thinking"].enabled
    if kwargs:
        chat["chat_template_kwargs"] = kwargs
    output = values["output_config"] or {}
    if output.get("format") is not None:
        chat["response_format"] = output["format"]
    if output.get("effort") is not None:
        chat["reasoning_effort"] = "xhigh" if output["effort"] == "max" else output["effort"]
    return chat
