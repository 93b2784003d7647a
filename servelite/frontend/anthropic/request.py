"""A `/v1/messages` body as a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from servelite.frontend.anthropic.answer import MessageTranslation
from servelite.frontend.anthropic.fields import COUNT_FIELDS, MESSAGES_FIELDS, NO_TOP_P, PASSED_ON
from servelite.frontend.anthropic.messages import Conversation
from servelite.frontend.anthropic.tools import Thinking, ToolChoice
from servelite.frontend.errors import bad_request
from servelite.frontend.fields import read_fields
from servelite.frontend.protocol import BodyRules, ChatRequest, read_chat
from servelite.frontend.translated import renamed

NAMES: Final = (
    ("max_completion_tokens", "max_tokens"),
    (r"response_format(\.json_schema)?", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\]|tool_choice)\.function", r"\1"),
)
"""Names in a chat's errors, and what they are here: see `renamed`."""


def read_message_request(body: Any, rules: BodyRules) -> MessageTranslation:
    """A decoded JSON body; raises `APIError` (400) naming the field."""
    values = read_fields(MESSAGES_FIELDS, body, rules.defaults, rules.unknown)
    chat = _prompt(values) | {f.name: body[f.name] for f in PASSED_ON if body.get(f.name) is not None}
    if chat.get("top_p") == NO_TOP_P:
        del chat["top_p"]
    chat |= {"max_completion_tokens": values["max_tokens"], "stop": list(values["stop_sequences"])}
    if values["stream"]:
        chat["stream"] = True
    thinking: Thinking | None = values["thinking"]
    if thinking is not None and rules.limits_thinking:
        chat["thinking_token_budget"] = thinking.budget
    with renamed(NAMES):
        request = read_chat(chat, rules)
    return MessageTranslation(request, shows_thinking=thinking is None or not thinking.hidden)


def read_count(body: Any, rules: BodyRules) -> ChatRequest:
    """A decoded JSON body of `/v1/messages/count_tokens`; raises `APIError` (400) naming the field."""
    values = read_fields(COUNT_FIELDS, body, rules.defaults, rules.unknown)
    with renamed(NAMES):
        return read_chat(_prompt(values), rules)


def _prompt(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of a chat's body decides the prompt and the answer's form."""
    conversation: Conversation = values["messages"]
    turns, system = conversation.turns, conversation.system
    if values["system"] is not None:
        system = [values["system"], *system]
    messages = [{"role": "system", "content": "\n".join(system)}, *turns] if system else turns
    chat: dict[str, Any] = {"model": values["model"], "messages": messages}
    form = (values["output_config"] or {}).get("format") or values["output_format"]
    last = turns[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        chat["continue_final_message"] = True  # Anthropic's way to say how the answer begins
        if form is not None:
            field = "output_format" if values["output_format"] else "output_config.format"
            raise bad_request(
                f"{field} is of a whole answer: it does not go with one that the last message begins", field
            )
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
    if form is not None:
        chat["response_format"] = form
    effort = (values["output_config"] or {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    return chat
