"""A `/v1/responses` body as a chat request, and what of it the answer repeats."""

from __future__ import annotations

from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import read_fields
from servelite.frontend.protocol import BodyRules, read_chat
from servelite.frontend.responses.answer import ResponseTranslation
from servelite.frontend.responses.fields import LOGPROBS, PASSED_ON, RESPONSES_FIELDS

NAMES: Final = (
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("messages", "input"),
    (".function.", "."),
)
"""Names in a chat's errors, and what they are here."""


def read_response(body: Any, rules: BodyRules) -> ResponseTranslation:
    """A decoded JSON body; raises `APIError` (400) naming the field."""
    values = read_fields(RESPONSES_FIELDS, body, rules.defaults, rules.unknown)
    if values["top_logprobs"] is not None and LOGPROBS not in values["include"]:
        raise bad_request(f"top_logprobs needs include: [{LOGPROBS!r}]", "top_logprobs")
    if values["stream_options"] is not None and not values["stream"]:
        raise bad_request("stream_options needs stream: true", "stream_options")
    text, reasoning = values["text"] or {}, values["reasoning"] or {}
    instructions = values["instructions"]
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    chat: dict[str, Any] = {f.name: body[f.name] for f in PASSED_ON if body.get(f.name) is not None}
    chat |= {
        "model": values["model"],
        "messages": system + values["input"],
        "max_completion_tokens": values["max_output_tokens"],
        "response_format": text.get("format"),
        "reasoning_effort": reasoning.get("effort"),
        "logprobs": LOGPROBS in values["include"],
        "top_logprobs": values["top_logprobs"],
    }
    if values["stream"]:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if values["tools"]:
        chat |= {"tools": values["tools"], "parallel_tool_calls": values["parallel_tool_calls"]}
    if values["tool_choice"] is not None:
        chat["tool_choice"] = values["tool_choice"]
    request = read_chat({name: value for name, value in chat.items() if value is not None}, rules)
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
        "tools": [_tool(tool) for tool in body.get("tools") or ()],
        "tool_choice": body.get("tool_choice") or "auto",
        "text": {"format": _format(text.get("format") and body["text"]["format"]), "verbosity": "medium"},
        "reasoning": {
            "effort": reasoning.get("effort"),
            "summary": (body.get("reasoning") or {}).get("summary"),
        },
        "metadata": values["metadata"] or {},
    }
    return ResponseTranslation(request, repeated)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as it was given, with all of its fields."""
    return {"type": "function", "description": None, "parameters": None, "strict": None} | tool


def _format(given: dict[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {"type": "text"}
    more = {"description": None, "strict": None} if given["type"] == "json_schema" else {}
    return more | given
