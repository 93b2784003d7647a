"""What each route answers, for the OpenAPI page, in the notation of `shapes`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from servelite.frontend.errors import ANTHROPIC_PATH
from servelite.frontend.fields import OneOf
from servelite.frontend.protocol import RENDER_PATH


@dataclass(frozen=True)
class Answered:
    """What a route does and answers.

    Attributes:
        whole: a JSON body's shape; None: a text.
        event: the shape of the JSON of a streamed answer's events; None: it has no stream.
        others: the shapes of answers by status, where they are no errors that all routes have.
    """

    summary: str
    whole: Any
    event: Any = None
    others: Mapping[int, Any] = field(default_factory=dict)


ERROR: Final = {"error": {"message": str, "type": str, "param": (str, None), "code": (str, None)}}
ANTHROPIC_ERROR: Final = {
    "type": "error",
    "error": {"type": str, "message": str, "details?": {"error_code": str}},
    "request_id": (str, None),
}

_USAGE: Final = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "total_tokens": int,
    "prompt_tokens_details": {"cached_tokens": int},
    "completion_tokens_details?": {"reasoning_tokens": int},
}
_HEAD: Final = {"id": str, "created": int, "model": str}
_TOKEN: Final = {"token": str, "logprob": float, "bytes": [int]}
_LOGPROBS: Final = [_TOKEN | {"top_logprobs": [_TOKEN]}]
_CHAT_LOGPROBS: Final = (None, {"content": _LOGPROBS, "refusal": None})
_LEGACY_LOGPROBS: Final = (
    None,
    {
        "tokens": [str],
        "token_logprobs": [(float, None)],
        "top_logprobs": [({"*": float}, None)],
        "text_offset": [int],
    },
)
_OF_PROMPT: Final = {
    "prompt_token_ids?": [int],
    "prompt_logprobs?": [(None, {"*": {"logprob": float, "rank": (int, None), "decoded_token": str}})],
}
_ENDS: Final = OneOf(("stop", "length", "tool_calls"))
_STOP: Final = (str, int, None)
_MESSAGE: Final = {
    "role": "assistant",
    "content": (str, None),
    "refusal": None,
    "reasoning_content?": str,
    "tool_calls?": [{"id": str, "type": "function", "function": {"name": str, "arguments": str}}],
}
_MORE_OF_A_CALL: Final = {
    "index": int,
    "id?": str,
    "type?": "function",
    "function": {"name?": str, "arguments": str},
}
_DELTA: Final = {
    "role?": "assistant",
    "content?": (str, None),
    "reasoning_content?": str,
    "tool_calls?": [_MORE_OF_A_CALL],
}


def _whole(kind: str, content: dict[str, Any], logprobs: Any) -> dict[str, Any]:
    choice = {"index": int, "logprobs": logprobs, "finish_reason": _ENDS, "stop_reason": _STOP}
    choices = [choice | content | {"token_ids?": [int]}]
    return _HEAD | {"object": kind, "choices": choices, "usage": _USAGE}


def _chunk(kind: str, content: dict[str, Any], logprobs: Any) -> tuple[Any, ...]:
    choice = {"index": int, "logprobs": logprobs, "finish_reason": (None, _ENDS), "stop_reason?": _STOP}
    choices = [choice | content | {"token_ids?": [int]}]
    return _HEAD | {"object": kind, "choices": choices, "usage?": (_USAGE, None)}, ERROR


_RESPONSE_USAGE: Final = {
    "input_tokens": int,
    "input_tokens_details": {"cached_tokens": int},
    "output_tokens": int,
    "output_tokens_details": {"reasoning_tokens": int},
    "total_tokens": int,
}
_STATUS: Final = OneOf(("in_progress", "completed", "incomplete"))
_ITEM: Final = {"id": str, "status": _STATUS}
_OUTPUT_TEXT: Final = {"type": "output_text", "text": str, "annotations": list, "logprobs": _LOGPROBS}
_OUTPUT_CALL: Final = {"call_id": str, "name": str, "namespace?": str}
_OUTPUT: Final = (
    _ITEM | {"type": "message", "role": "assistant", "content": [_OUTPUT_TEXT]},
    _ITEM | {"type": "reasoning", "summary": list, "content": [{"type": "reasoning_text", "text": str}]},
    _ITEM | _OUTPUT_CALL | {"type": "function_call", "arguments": str},
    _ITEM | _OUTPUT_CALL | {"type": "custom_tool_call", "input": str},
)
_RESPONSE: Final = {
    "id": str,
    "object": "response",
    "created_at": int,
    "completed_at": (int, None),
    "status": OneOf(("in_progress", "completed", "incomplete", "failed")),
    "error": (None, {"code": str, "message": str}),
    "incomplete_details": (None, {"reason": "max_output_tokens"}),
    "output": [_OUTPUT],
    "usage": (None, _RESPONSE_USAGE),
    "model": str,
    "instructions": (str, None),
    "max_output_tokens": (int, None),
    "temperature": float,
    "top_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "top_logprobs": int,
    "parallel_tool_calls": bool,
    "tools": [{"type": str, "name": str, "*": Any}],
    "tool_choice": (str, dict),
    "text": {"format": {"type": str, "*": Any}, "verbosity": str},
    "reasoning": {"effort": (str, None), "summary": (str, None)},
    "metadata": dict,
    "background": bool,
    "store": bool,
    "truncation": "disabled",
    "service_tier": str,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "user": None,
}
_RESPONSE_EVENT: Final = {"type": str, "sequence_number": int}
_ANTHROPIC_USAGE: Final = {
    "input_tokens": int,
    "cache_creation_input_tokens": int,
    "cache_read_input_tokens": int,
    "cache_creation": None,
    "output_tokens": int,
    "output_tokens_details": (None, {"thinking_tokens": int}),
    "server_tool_use": None,
    "service_tier": str,
    "inference_geo": None,
}
_BLOCK: Final = (
    {"type": "text", "text": str, "citations": [Any]},
    {"type": "thinking", "thinking": str, "signature": str},
    {"type": "tool_use", "id": str, "name": str, "input": dict, "caller": {"type": "direct"}},
)
_ANTHROPIC_END: Final = {
    "stop_reason": (None, OneOf(("end_turn", "max_tokens", "tool_use", "stop_sequence"))),
    "stop_sequence": (str, None),
    "stop_details": None,
    "container": None,
}
_ANTHROPIC_MESSAGE: Final = _ANTHROPIC_END | {
    "id": str,
    "type": "message",
    "role": "assistant",
    "model": str,
    "content": [_BLOCK],
    "usage": _ANTHROPIC_USAGE,
}
_ANTHROPIC_EVENT: Final = (
    {"type": "message_start", "message": _ANTHROPIC_MESSAGE},
    {"type": "content_block_start", "index": int, "content_block": _BLOCK},
    {"type": "content_block_delta", "index": int, "delta": {"type": str, "*": str}},
    {"type": "content_block_stop", "index": int},
    {"type": "message_delta", "delta": _ANTHROPIC_END, "usage": _ANTHROPIC_USAGE},
    {"type": OneOf(("message_stop", "ping"))},
    ANTHROPIC_ERROR,
)
_CARD: Final = {"id": str, "object": "model", "created": int, "owned_by": str, "max_model_len?": int}
_STATE: Final = {"status": str}

ROUTES: Final = {
    "/v1/chat/completions": Answered(
        "Answer a conversation, whole or as a stream",
        _whole("chat.completion", {"message": _MESSAGE}, _CHAT_LOGPROBS) | _OF_PROMPT,
        _chunk("chat.completion.chunk", {"delta": _DELTA}, _CHAT_LOGPROBS),
    ),
    "/v1/completions": Answered(
        "Continue each prompt, whole or as a stream",
        _whole("text_completion", {"text": str} | _OF_PROMPT, _LEGACY_LOGPROBS),
        _chunk("text_completion", {"text": str} | _OF_PROMPT, _LEGACY_LOGPROBS),
    ),
    "/v1/embeddings": Answered(
        "A vector for each text",
        {
            "object": "list",
            "data": [{"object": "embedding", "index": int, "embedding": ([float], str)}],
            "model": str,
            "usage": {"prompt_tokens": int, "total_tokens": int},
        },
    ),
    "/v1/responses": Answered("OpenAI's Responses API", _RESPONSE, _RESPONSE_EVENT | {"*": Any}),
    ANTHROPIC_PATH: Answered("Anthropic's Messages API", _ANTHROPIC_MESSAGE, _ANTHROPIC_EVENT),
    f"{ANTHROPIC_PATH}/count_tokens": Answered("How many tokens such a prompt has", {"input_tokens": int}),
    RENDER_PATH: Answered(
        "A dry run: a chat's prompt as the template writes it, and its token IDs",
        {"prompt": str, "prompt_token_ids": [int], "count": int, "max_model_len": int},
    ),
    "/tokenize": Answered(
        "A prompt or a chat as token IDs",
        {"count": int, "max_model_len": int, "tokens": [int], "token_strs": ([str], None)},
    ),
    "/detokenize": Answered("Token IDs as text", {"prompt": str}),
    "/v1/models": Answered("The names of the model", {"object": "list", "data": [_CARD]}),
    "/v1/models/{name}": Answered("One of them", _CARD, others={404: ERROR}),
    "/health": Answered("Whether a token could be produced now", _STATE, others={503: _STATE}),
    "/health/ready": Answered("The same", _STATE, others={503: _STATE}),
    "/health/live": Answered("Whether the process runs", _STATE),
    "/version": Answered("The version", {"version": str}),
    "/metrics": Answered("Prometheus metrics", None),
    "/openapi.json": Answered("This page", dict),
}
"""By the route's path."""
