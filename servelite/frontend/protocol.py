"""The request bodies of `/v1/chat/completions` and `/v1/completions`: every field, declared once.

OpenAI's meaning is the contract; where OpenAI is silent the names are vLLM's. A field that is not
declared here is refused by name: nothing is accepted and ignored, except what asks nothing of the
answer (`Harmless`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import (
    REQUIRED,
    Boolean,
    Custom,
    Field,
    Harmless,
    Integer,
    Object,
    Only,
    String,
    read_fields,
    shown,
)
from servelite.frontend.sampling import MAX_TOKENS, SAMPLING_FIELDS, Sampling

MAX_MESSAGES: Final = 4096
COMPLETION_MAX_TOKENS: Final = 16  # OpenAI's default of /v1/completions
ROLES: Final = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class ChatRequest:
    """A parsed body of `/v1/chat/completions`. `max_tokens` None: to the context's end."""

    model: str
    messages: list[dict[str, str]]  # role, content, and name where given
    sampling: Sampling
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed body of `/v1/completions`."""

    model: str
    prompt: str | list[int]
    sampling: Sampling
    stream: bool
    include_usage: bool


def read_messages(path: str, value: Any) -> list[dict[str, str]]:
    """The messages of a chat: each a role and its text (content parts joined by line breaks)."""
    if not isinstance(value, list) or not value:
        raise bad_request(f"{path} must be a list with at least one message, not {shown(value)}", path)
    if len(value) > MAX_MESSAGES:
        raise bad_request(f"{path} has {len(value)} messages; the limit is {MAX_MESSAGES}", path)
    return [_read_message(f"{path}[{i}]", message) for i, message in enumerate(value)]


def _read_message(path: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise bad_request(f"{path} must be an object, not {shown(message)}", path)
    for name, value in message.items():
        # An answer of ours (or of OpenAI's) sent back as it came has more fields, all of them empty.
        if name not in ("role", "content", "name") and value not in (None, [], ""):
            raise bad_request(f"{path}.{name} is not supported", f"{path}.{name}", "unsupported_value")
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
            raise bad_request(f"Unknown field {path}.{name}", f"{path}.{name}", "unknown_field")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{path}.text must be a string, not {shown(part.get('text'))}", f"{path}.text")
    return str(part["text"])


def read_prompt(path: str, value: Any) -> str | list[int]:
    """One prompt: a text, token IDs, or a list of one of either."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        return read_prompt(f"{path}[0]", value[0])
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    if isinstance(value, list) and len(value) > 1 and all(isinstance(item, (str, list)) for item in value):
        raise bad_request(
            f"{path} holds {len(value)} prompts; one a request is supported", path, "unsupported_value"
        )
    raise bad_request(f"{path} must be a string or a list of token IDs, not {shown(value)}", path)


_OPTIONS_OF_STREAM = (
    Field("include_usage", Boolean(), False, "a last chunk with the token counts"),
    Field("include_obfuscation", Only((False, True)), None, "accepted; nothing is padded"),
)

_COMMON_FIELDS: Final = (
    Field("model", String(512), REQUIRED, "a name that `/v1/models` lists"),
    *SAMPLING_FIELDS,
    Field("stream", Boolean(), False, "send the answer as it comes, as server-sent events"),
    Field("stream_options", Object(_OPTIONS_OF_STREAM), None, "with `stream` only"),
    Field("n", Only((1,)), None, "answers a prompt"),
    Field("presence_penalty", Only((0,)), None, "how much to avoid what was said"),
    Field("frequency_penalty", Only((0,)), None, "the same, by how often it was said"),
    Field("repetition_penalty", Only((1,)), None, "the same, as a factor"),
    Field("min_p", Only((0,)), None, "least probability, as a share of the likeliest"),
    Field("min_tokens", Only((0,)), None, "shortest answer, in tokens"),
    Field("logit_bias", Only(({},)), None, "added to the logits of given tokens"),
    Field("stop_token_ids", Only(([],)), None, "tokens that end the answer"),
    Field("user", Harmless(), None, "accepted, without effect"),
    Field("metadata", Harmless(), None, "accepted, without effect"),
    Field("store", Harmless(), None, "accepted, without effect: nothing is stored"),
    Field("service_tier", Harmless(), None, "accepted, without effect"),
    Field("safety_identifier", Harmless(), None, "accepted, without effect"),
    Field("prompt_cache_key", Harmless(), None, "accepted, without effect"),
    Field("prompt_cache_retention", Harmless(), None, "accepted, without effect"),
)

CHAT_FIELDS: Final = (
    Field("messages", Custom(read_messages, "list of messages"), REQUIRED, "the conversation so far"),
    *_COMMON_FIELDS,
    Field("max_completion_tokens", Integer(1, MAX_TOKENS), None, "absent: to the context's end"),
    Field("max_tokens", Integer(1, MAX_TOKENS), None, "the older name of `max_completion_tokens`"),
    Field("response_format", Only(({"type": "text"},)), None, "the form of the answer"),
    Field("logprobs", Only((False,)), None, "log probabilities of the answer"),
    Field("top_logprobs", Only((0,)), None, "and of this many likeliest tokens"),
    Field("tools", Only(([],)), None, "functions the model may call"),
    Field("tool_choice", Only(("none", "auto")), None, "without tools both mean the same"),
    Field("parallel_tool_calls", Only((True, False)), None, "without tools both mean the same"),
    Field("functions", Only(([],)), None, "the older name of `tools`"),
    Field("function_call", Only(("none", "auto")), None, "without functions both mean the same"),
    Field("modalities", Only((["text"],)), None, "kinds of answer"),
    Field("verbosity", Only(("medium",)), None, "how wordy the answer is"),
)

COMPLETION_FIELDS: Final = (
    Field("prompt", Custom(read_prompt, "string or list of token IDs"), REQUIRED, "what to continue"),
    *_COMMON_FIELDS,
    Field("max_tokens", Integer(1, MAX_TOKENS), COMPLETION_MAX_TOKENS, "longest answer, in tokens"),
    Field("logprobs", Only(()), None, "log probabilities of this many likeliest tokens"),
    Field("echo", Only((False,)), None, "repeat the prompt before the answer"),
    Field("best_of", Only((1,)), None, "answers to choose from"),
    Field("suffix", Only(("",)), None, "what follows the answer"),
)


def read_chat(body: Any) -> ChatRequest:
    """A decoded JSON body as a chat request; raises `APIError` (400) naming the field."""
    values = read_fields(CHAT_FIELDS, body)
    longer, shorter = values["max_completion_tokens"], values["max_tokens"]
    if longer is not None and shorter is not None and longer != shorter:
        raise bad_request(
            f"max_tokens is {shorter} and max_completion_tokens is {longer}: give one of them", "max_tokens"
        )
    max_tokens = shorter if longer is None else longer
    return ChatRequest(
        values["model"], values["messages"], Sampling.from_fields(values, max_tokens), *_stream(values)
    )


def read_completion(body: Any) -> CompletionRequest:
    """A decoded JSON body as a completion request; raises `APIError` (400) naming the field."""
    values = read_fields(COMPLETION_FIELDS, body)
    sampling = Sampling.from_fields(values, values["max_tokens"])
    return CompletionRequest(values["model"], values["prompt"], sampling, *_stream(values))


def _stream(values: dict[str, Any]) -> tuple[bool, bool]:
    options = values["stream_options"]
    if options is not None and not values["stream"]:
        raise bad_request("stream_options needs stream: true", "stream_options")
    return values["stream"], bool(options and options["include_usage"])
