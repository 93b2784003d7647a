"""The fields of a `/v1/responses` body."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import (
    REQUIRED,
    Boolean,
    Custom,
    Field,
    Harmless,
    Integer,
    JSONObject,
    Object,
    OneOf,
    Only,
    Refused,
    String,
    shown,
)
from servelite.frontend.protocol import CHAT_FIELDS, SUMMARY
from servelite.frontend.responses.items import INPUT_SCHEMA, read_input
from servelite.frontend.responses.tools import (
    FORMAT_SCHEMA,
    TOOL_CHOICE_SCHEMA,
    TOOLS_SCHEMA,
    read_format,
    read_tool_choice,
    read_tools,
)
from servelite.frontend.sampling import MAX_TOKENS, SAMPLING_FIELDS
from servelite.frontend.shapes import Items

LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDES: Final = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
_OF_CHATS: Final = {f.name: f.type for f in CHAT_FIELDS}

PASSED_ON: Final = tuple(
    f
    for f in CHAT_FIELDS
    if f in SAMPLING_FIELDS
    or f.name
    in (
        "chat_template_kwargs",
        "cache_salt",
        "priority",
        "deadline_ms",
        "truncate_prompt_tokens",
        "truncation_side",
    )
)
"""Fields that mean here what they mean in a chat."""


def read_include(path: str, value: Any) -> tuple[str, ...]:
    """What more the output should hold."""
    if not isinstance(value, list) or len(value) > 16:
        raise bad_request(f"{path} must be a list of at most 16 strings, not {shown(value)}", path)
    for i, item in enumerate(value):
        if item not in _INCLUDES:
            raise bad_request(
                f"{path}[{i}] is {shown(item)}; supported: {', '.join(_INCLUDES)}",
                f"{path}[{i}]",
                "unsupported_value",
            )
    return tuple(value)


_REASONING = (
    Field("effort", _OF_CHATS["reasoning_effort"], None, "a chat's `reasoning_effort`"),
    SUMMARY,
    replace(SUMMARY, name="generate_summary", meaning="the older name of `summary`"),
    Field("context", Only(("auto",)), None, "the chat template decides what it shows of earlier reasoning"),
    Field("mode", Only(("standard",)), None, "how the model thinks"),
)
_TEXT = (
    Field("format", Custom(read_format, "object with type", FORMAT_SCHEMA), None, "the form of the answer"),
    Field("verbosity", _OF_CHATS["verbosity"], None, "a variable for the chat template"),
)
_CACHE = (
    Field("mode", Harmless(), None, "accepted, without effect"),
    Field("ttl", Harmless(), None, "accepted, without effect"),
    Field("prewarm", Only((False,)), None, "every request is answered"),
)
_STREAM = (Field("include_obfuscation", Only((False, True)), None, "accepted; nothing is padded"),)

RESPONSES_FIELDS: Final = (
    Field("model", String(512), REQUIRED, "a name that `/v1/models` lists"),
    Field(
        "input",
        Custom(
            read_input,
            "string, or list of items: messages, calls, their outputs, reasoning",
            INPUT_SCHEMA,
        ),
        REQUIRED,
        "the conversation so far",
    ),
    Field("instructions", String(1 << 24), None, "a system message before the input"),
    Field("max_output_tokens", Integer(1, MAX_TOKENS), None, "absent: to the context's end"),
    *PASSED_ON,
    Field("stream", Boolean(), False, "send events as the answer comes"),
    Field("stream_options", Object(_STREAM), None, "accepted, without effect"),
    Field("text", Object(_TEXT), None, "`format`: as a chat's `response_format`"),
    Field(
        "tools",
        Custom(read_tools, "list of functions, custom tools, namespaces of them", TOOLS_SCHEMA),
        (),
        "what the model may call",
    ),
    Field(
        "tool_choice",
        Custom(read_tool_choice, "string or object", TOOL_CHOICE_SCHEMA),
        None,
        "as a chat's; `allowed_tools`: the model sees only these",
    ),
    Field("parallel_tool_calls", Boolean(), True, "whether there may be more than one call"),
    Field("reasoning", Object(_REASONING), None, "how much the model thinks"),
    Field(
        "include",
        Custom(
            read_include,
            "list of " + ", ".join(f"`{name}`" for name in _INCLUDES),
            Items(OneOf(_INCLUDES), 0, 16).schema(),
        ),
        (),
        "log probabilities; reasoning is never encrypted: it is plain text in its item; of the others there "
        "is nothing to include",
    ),
    Field("top_logprobs", Integer(0, 20), None, "of this many likeliest tokens; needs `include` of them"),
    Field("store", Only((False, True)), None, "accepted: nothing is stored, and the answer says so"),
    Field("background", Only((False,)), None, "nothing runs in the background"),
    Field("previous_response_id", Refused("nothing is stored: send the whole input"), None, ""),
    Field("conversation", Refused("nothing is stored: send the whole input"), None, ""),
    Field("prompt", Refused("there are no stored prompts"), None, ""),
    Field("max_tool_calls", Harmless(), None, "accepted: there are no built-in tools, whose calls it counts"),
    Field("truncation", Only(("disabled", "auto")), None, "with both, input that does not fit is refused"),
    Field("metadata", JSONObject(4), None, "given back in the answer"),
    Field("user", Harmless(), None, "accepted, without effect"),
    Field("service_tier", Harmless(), None, "accepted, without effect"),
    Field("safety_identifier", Harmless(), None, "accepted, without effect"),
    Field("prompt_cache_key", Harmless(), None, "accepted, without effect"),
    Field("prompt_cache_retention", Harmless(), None, "accepted, without effect"),
    Field("prompt_cache_options", Object(_CACHE), None, "accepted, without effect"),
    Field("client_metadata", Harmless(), None, "accepted, without effect"),
)
