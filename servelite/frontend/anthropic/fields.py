"""The fields of the bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from servelite.frontend.anthropic.messages import (
    MESSAGES_SCHEMA,
    SYSTEM_SCHEMA,
    read_messages,
    read_system,
)
from servelite.frontend.anthropic.tools import (
    EDITS_SCHEMA,
    FORMAT_SCHEMA,
    THINKING_SCHEMA,
    TOOL_CHOICE_SCHEMA,
    TOOLS_SCHEMA,
    read_edits,
    read_output_format,
    read_thinking,
    read_tool_choice,
    read_tools,
)
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
    Strings,
)
from servelite.frontend.protocol import CHAT_FIELDS
from servelite.frontend.sampling import MAX_STOP_CHARS, MAX_STOPS, MAX_TOKENS, SAMPLING_FIELDS

NO_TOP_P: Final = -1
"""What LangChain's older clients send for none."""


def _read_top_p(path: str, value: Any) -> Any:
    return None if value == NO_TOP_P else _TOP_P.read(path, value)


_TOP_P: Final = next(f.type for f in SAMPLING_FIELDS if f.name == "top_p")
_OR_NONE: Final = Custom(
    _read_top_p,
    f"{_TOP_P.describe()}, or {NO_TOP_P}: none is given",
    {"anyOf": [_TOP_P.schema(), {"const": NO_TOP_P}]},
)

PASSED_ON: Final = tuple(
    replace(f, type=_OR_NONE) if f.name == "top_p" else f
    for f in CHAT_FIELDS
    if (f in SAMPLING_FIELDS and f.name != "stop")
    or f.name in ("cache_salt", "priority", "deadline_ms", "truncate_prompt_tokens", "truncation_side")
)
"""Fields that mean here what they mean in a chat."""

EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_FORMAT = Custom(read_output_format, "object with type and schema", FORMAT_SCHEMA)
_OUTPUT = (
    Field("effort", OneOf(EFFORTS), None, "a chat's `reasoning_effort`; `max`: `xhigh`"),
    Field("format", _FORMAT, None, "a JSON schema"),
)

_EDITS = (
    Field(
        "edits",
        Custom(read_edits, "list of edits that clear thinking or tool uses", EDITS_SCHEMA),
        None,
        "what may be left out of the prompt",
    ),
)
_HARMLESS: Final = (
    "service_tier",
    "inference_geo",
    "diagnostics",
    "billing_policy",
    "fallbacks",
    "fallback_credit_token",
)
"""They ask nothing of the answer: where it is made, what it costs, who else would give one."""

COUNT_FIELDS: Final = (
    Field("model", String(512), REQUIRED, "a name that `/v1/models` lists"),
    Field(
        "messages",
        Custom(read_messages, "list of Anthropic's messages", MESSAGES_SCHEMA),
        REQUIRED,
        "the conversation so far",
    ),
    Field(
        "system",
        Custom(read_system, "string, or list of text blocks", SYSTEM_SCHEMA),
        None,
        "the system prompt",
    ),
    Field(
        "tools",
        Custom(read_tools, "list of Anthropic's tools", TOOLS_SCHEMA),
        (),
        "functions the model may call",
    ),
    Field(
        "tool_choice",
        Custom(read_tool_choice, "object with type, name", TOOL_CHOICE_SCHEMA),
        None,
        "whether it calls one, which",
    ),
    Field(
        "thinking",
        Custom(read_thinking, "object with type, budget_tokens", THINKING_SCHEMA),
        None,
        "the template's `enable_thinking`; `budget_tokens`: most tokens, where the model can be held to it",
    ),
    Field(
        "output_config",
        Object(_OUTPUT),
        None,
        "`effort`: how much to think; `format`: the answer's JSON schema",
    ),
    Field("output_format", _FORMAT, None, "the older name of `output_config.format`, which wins"),
    Field("chat_template_kwargs", JSONObject(32), None, "more variables for the chat template"),
    Field("cache_control", Harmless(), None, "accepted: every prompt is cached"),
    Field("context_management", Object(_EDITS), None, "accepted, without effect: nothing is cleared"),
    Field("mcp_servers", Only(([],)), None, "none is called from here"),
    Field("speed", Only(("standard",)), None, "there is one"),
)

MESSAGES_FIELDS: Final = (
    *COUNT_FIELDS,
    Field("max_tokens", Integer(1, MAX_TOKENS), REQUIRED, "longest answer, in tokens"),
    *PASSED_ON,
    Field("stop_sequences", Strings(MAX_STOPS, MAX_STOP_CHARS), (), "texts that end the answer, left out"),
    Field("stream", Boolean(), False, "send events as the answer comes"),
    Field("metadata", Harmless(), None, "accepted, without effect"),
    *(Field(name, Harmless(), None, "accepted, without effect") for name in _HARMLESS),
    Field("container", Refused("there are none"), None, ""),
    # By this code Anthropic's SDK knows to send the whole conversation instead.
    Field("thread", Refused("nothing is stored: send all messages", "thread_unsupported_request"), None, ""),
    Field("compaction", Refused("the conversation is the client's to shorten"), None, ""),
)
