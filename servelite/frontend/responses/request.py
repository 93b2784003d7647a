"""A `/v1/responses` body as a chat request, and what of it the answer repeats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import read_fields
from servelite.frontend.protocol import BodyRules, read_chat
from servelite.frontend.responses.answer import ResponseTranslation
from servelite.frontend.responses.fields import LOGPROBS, PASSED_ON, RESPONSES_FIELDS
from servelite.frontend.responses.tools import KINDS, choose
from servelite.frontend.translated import renamed

NAMES: Final = (
    ("max_completion_tokens", "max_output_tokens"),
    (r"response_format(\.json_schema)?", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    ("messages", "input"),
    ("logprobs", "include"),
)
"""Names in a chat's errors, and what they are here: see `renamed`."""


def read_response(body: Any, rules: BodyRules) -> ResponseTranslation:
    """A decoded JSON body; raises `APIError` (400) naming the field."""
    values = read_fields(RESPONSES_FIELDS, body, rules.defaults, rules.unknown)
    if values["top_logprobs"] and LOGPROBS not in values["include"]:
        raise bad_request(f"top_logprobs needs include: [{LOGPROBS!r}]", "top_logprobs")
    text, reasoning = values["text"] or {}, values["reasoning"] or {}
    tools, choice = choose(values["tool_choice"], values["tools"])
    instructions = values["instructions"]
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    chat: dict[str, Any] = {f.name: body[f.name] for f in PASSED_ON if body.get(f.name) is not None}
    chat |= {
        "model": values["model"],
        "messages": system + values["input"],
        "max_completion_tokens": values["max_output_tokens"],
        "response_format": text.get("format"),
        "reasoning_effort": reasoning.get("effort"),
        "verbosity": text.get("verbosity"),
        "logprobs": LOGPROBS in values["include"],
        "top_logprobs": values["top_logprobs"] or None,
        "tool_choice": choice,
    }
    if values["stream"]:
        chat["stream"] = True
    if tools:
        declared = [{"type": "function", "function": tool.function} for tool in tools]
        chat |= {"tools": declared, "parallel_tool_calls": values["parallel_tool_calls"]}
    with renamed(NAMES):
        request = read_chat({name: value for name, value in chat.items() if value is not None}, rules)
    places = tuple(f"{tool.place}.parameters" for tool in tools)
    request = replace(request, tools=replace(request.tools, places=places))
    repeated = {
        "model": values["model"],
        "instructions": instructions,
        "max_output_tokens": values["max_output_tokens"],
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "presence_penalty": request.sampling.presence_penalty,
        "frequency_penalty": request.sampling.frequency_penalty,
        "top_logprobs": values["top_logprobs"] or 0,
        "parallel_tool_calls": values["parallel_tool_calls"],
        "tools": [_tool(tool) for tool in body.get("tools") or () if tool.get("type") in KINDS],
        "tool_choice": body.get("tool_choice") or "auto",
        "text": {
            "format": _format(text.get("format") and body["text"]["format"]),
            "verbosity": text.get("verbosity") or "medium",
        },
        "reasoning": {
            "effort": reasoning.get("effort"),
            "summary": (body.get("reasoning") or {}).get("summary"),
        },
        "metadata": values["metadata"] or {},
    }
    return ResponseTranslation(request, repeated, tools)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as it was given; a function with all of its fields."""
    more = {"description": None, "parameters": None, "strict": None} if tool["type"] == KINDS[0] else {}
    return more | tool


def _format(given: dict[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {"type": "text"}
    more = {"description": None, "strict": None} if given["type"] == "json_schema" else {}
    return more | given
