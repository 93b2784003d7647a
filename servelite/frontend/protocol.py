"""The request bodies of the API: every field, declared once.

OpenAI's meaning is the contract; where OpenAI is silent the names are vLLM's. A field that is not
declared here is refused by name: nothing is accepted and ignored, except what asks nothing of the
answer (`Harmless`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import (
    NO_DEFAULTS,
    REQUIRED,
    Boolean,
    Custom,
    Field,
    Harmless,
    Integer,
    JSONObject,
    Object,
    Only,
    String,
    TokenIDs,
    read_fields,
    refuse_unknown,
)
from servelite.frontend.prompts import Message, Prompt, read_messages, read_prompts
from servelite.frontend.sampling import MAX_TOKENS, SAMPLING_FIELDS, Sampling

COMPLETION_MAX_TOKENS: Final = 16  # OpenAI's default of /v1/completions
MAX_CHOICES: Final = 128
MAX_LOGPROBS: Final = 1024
MAX_DEADLINE_MS: Final = 86_400_000
RESERVED_TEMPLATE_NAMES: Final = ("self", "messages", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True)
class TemplateOptions:
    """How a chat is written out."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # what else the template sees


@dataclass(frozen=True)
class RequestOptions:
    """What a request wants of the engine beside its prompt and its `Sampling`."""

    n: int = 1
    logprobs: int = -1  # -1: none; k: those of the chosen token and of the k likeliest
    prompt_logprobs: int = -1
    cache_salt: str = ""
    priority: int = 0
    deadline_ms: int = -1  # from arrival; -1: none
    length_field: str = "max_tokens"  # the one that was used


@dataclass(frozen=True)
class AnswerForm:
    """How the answer is written."""

    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False  # vLLM's table of them, beside what `echo` shows
    echo: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """A parsed body of `/v1/chat/completions`. `max_tokens` None: to the context's end."""

    model: str
    messages: list[Message]
    template: TemplateOptions
    sampling: Sampling
    options: RequestOptions
    form: AnswerForm


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed body of `/v1/completions`."""

    model: str
    prompts: list[Prompt]
    sampling: Sampling
    options: RequestOptions
    form: AnswerForm


@dataclass(frozen=True)
class TokenizeRequest:
    """A parsed body of `/tokenize`: a prompt, or a chat."""

    model: str | None
    prompt: str | None
    messages: list[Message] | None
    template: TemplateOptions
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True)
class DetokenizeRequest:
    """A parsed body of `/detokenize`."""

    model: str | None
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class BodyRules:
    """What a server's settings and its model's files decide about bodies."""

    defaults: Mapping[str, Any] = field(default_factory=lambda: NO_DEFAULTS)  # of sampling fields
    unknown: Callable[[str], None] = refuse_unknown


_OPTIONS_OF_STREAM = (
    Field("include_usage", Boolean(), False, "a last chunk with the token counts"),
    Field("include_obfuscation", Only((False, True)), None, "accepted; nothing is padded"),
)

_COMMON_FIELDS: Final = (
    Field("model", String(512), REQUIRED, "a name that `/v1/models` lists"),
    Field("n", Integer(1, MAX_CHOICES), 1, "answers a prompt; they share its KV blocks"),
    *SAMPLING_FIELDS,
    Field("stream", Boolean(), False, "send the answer as it comes, as server-sent events"),
    Field("stream_options", Object(_OPTIONS_OF_STREAM), None, "with `stream` only"),
    Field(
        "prompt_logprobs",
        Integer(0, MAX_LOGPROBS),
        None,
        "log probabilities of the prompt's tokens and of this many likeliest; not with `stream`",
    ),
    Field("return_token_ids", Boolean(), False, "the token IDs of prompt and answer as well"),
    Field("cache_salt", String(256), "", "only requests with the same salt share cached blocks"),
    Field(
        "priority",
        Integer(-(1 << 31), (1 << 31) - 1),
        0,
        "lower runs first; other than 0 only under `--scheduling-policy priority`",
    ),
    Field(
        "deadline_ms",
        Integer(1, MAX_DEADLINE_MS),
        None,
        "a request that has not begun to run after this long gets a 503, code `deadline_exceeded`",
    ),
    Field("user", Harmless(), None, "accepted, without effect"),
    Field("metadata", Harmless(), None, "accepted, without effect"),
    Field("store", Harmless(), None, "accepted, without effect: nothing is stored"),
    Field("service_tier", Harmless(), None, "accepted, without effect"),
    Field("safety_identifier", Harmless(), None, "accepted, without effect"),
    Field("prompt_cache_key", Harmless(), None, "accepted, without effect"),
    Field("prompt_cache_retention", Harmless(), None, "accepted, without effect"),
)

_TEMPLATE_FIELDS: Final = (
    Field(
        "add_generation_prompt",
        Boolean(),
        None,
        "end with the assistant's opening; absent: true, unless `continue_final_message`",
    ),
    Field("continue_final_message", Boolean(), False, "leave the last message open, to be continued"),
    Field("chat_template_kwargs", JSONObject(32), None, "more variables for the chat template"),
)

CHAT_FIELDS: Final = (
    Field("messages", Custom(read_messages, "list of messages"), REQUIRED, "the conversation so far"),
    *_COMMON_FIELDS,
    *_TEMPLATE_FIELDS,
    Field("max_completion_tokens", Integer(1, MAX_TOKENS), None, "absent: to the context's end"),
    Field("max_tokens", Integer(1, MAX_TOKENS), None, "the older name of `max_completion_tokens`"),
    Field("logprobs", Boolean(), False, "log probabilities of the answer's tokens"),
    Field("top_logprobs", Integer(0, 20), None, "and of this many likeliest tokens; needs `logprobs`"),
    Field("response_format", Only(({"type": "text"},)), None, "the form of the answer"),
    Field("tools", Only(([],)), None, "functions the model may call"),
    Field("tool_choice", Only(("none", "auto")), None, "without tools both mean the same"),
    Field("parallel_tool_calls", Only((True, False)), None, "without tools both mean the same"),
    Field("functions", Only(([],)), None, "the older name of `tools`"),
    Field("function_call", Only(("none", "auto")), None, "without functions both mean the same"),
    Field("modalities", Only((["text"],)), None, "kinds of answer"),
    Field("verbosity", Only(("medium",)), None, "how wordy the answer is"),
)

COMPLETION_FIELDS: Final = (
    Field(
        "prompt",
        Custom(read_prompts, "string, list of token IDs, or list of either"),
        REQUIRED,
        "what to continue; a control token that is spelled out in a text stays text: give its ID for it",
    ),
    *_COMMON_FIELDS,
    Field("max_tokens", Integer(1, MAX_TOKENS), COMPLETION_MAX_TOKENS, "longest answer, in tokens"),
    Field(
        "logprobs",
        Integer(0, MAX_LOGPROBS),
        None,
        "log probabilities of the answer's tokens and of this many likeliest, at most `--max-logprobs`",
    ),
    Field("echo", Boolean(), False, "the prompt before the answer, its `logprobs` too"),
    Field("best_of", Only((1,)), None, "answers to choose from"),
    Field("suffix", Only(("",)), None, "what follows the answer"),
)

TOKENIZE_FIELDS: Final = (
    Field("model", String(512), None, "a name that `/v1/models` lists"),
    Field("prompt", String(1 << 24), None, "a text; this or `messages`"),
    Field("messages", Custom(read_messages, "list of messages"), None, "a chat; this or `prompt`"),
    Field("add_special_tokens", Boolean(), True, "BOS and EOS as the model has them, for a `prompt`"),
    *_TEMPLATE_FIELDS,
    Field("return_token_strs", Boolean(), False, "the tokens' texts as well"),
)

DETOKENIZE_FIELDS: Final = (
    Field("model", String(512), None, "a name that `/v1/models` lists"),
    Field("tokens", TokenIDs(1 << 20), REQUIRED, "token IDs"),
)

ENDPOINTS: Final = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/tokenize": TOKENIZE_FIELDS,
    "/detokenize": DETOKENIZE_FIELDS,
}
"""Every route that takes a body, and its fields."""

PLAIN_RULES: Final = BodyRules()


def read_chat(body: Any, rules: BodyRules = PLAIN_RULES) -> ChatRequest:
    """A decoded JSON body as a chat request; raises `APIError` (400) naming the field."""
    values = read_fields(CHAT_FIELDS, body, rules.defaults, rules.unknown)
    longer, shorter = values["max_completion_tokens"], values["max_tokens"]
    if longer is not None and shorter is not None and longer != shorter:
        raise bad_request(
            f"max_tokens is {shorter} and max_completion_tokens is {longer}: give one of them", "max_tokens"
        )
    max_tokens = shorter if longer is None else longer
    if values["top_logprobs"] is not None and not values["logprobs"]:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    logprobs = (values["top_logprobs"] or 0) if values["logprobs"] else -1
    return ChatRequest(
        values["model"],
        values["messages"],
        _template(values),
        Sampling.from_fields(values, max_tokens),
        _options(
            values,
            logprobs,
            _or_none(values["prompt_logprobs"]),
            "max_tokens" if longer is None else "max_completion_tokens",
        ),
        _form(values, logprobs),
    )


def read_completion(body: Any, rules: BodyRules = PLAIN_RULES) -> CompletionRequest:
    """A decoded JSON body as a completion request; raises `APIError` (400) naming the field."""
    values = read_fields(COMPLETION_FIELDS, body, rules.defaults, rules.unknown)
    logprobs, prompt_logprobs = _or_none(values["logprobs"]), _or_none(values["prompt_logprobs"])
    if values["echo"]:
        prompt_logprobs = max(prompt_logprobs, logprobs)
    return CompletionRequest(
        values["model"],
        values["prompt"],
        Sampling.from_fields(values, values["max_tokens"]),
        _options(values, logprobs, prompt_logprobs),
        _form(values, logprobs),
    )


def read_tokenize(body: Any, rules: BodyRules = PLAIN_RULES) -> TokenizeRequest:
    """A decoded JSON body of `/tokenize`; raises `APIError` (400) naming the field."""
    values = read_fields(TOKENIZE_FIELDS, body, rules.defaults, rules.unknown)
    if (values["prompt"] is None) == (values["messages"] is None):
        raise bad_request("give either prompt or messages", "prompt")
    return TokenizeRequest(
        values["model"],
        values["prompt"],
        values["messages"],
        _template(values),
        values["add_special_tokens"],
        values["return_token_strs"],
    )


def read_detokenize(body: Any, rules: BodyRules = PLAIN_RULES) -> DetokenizeRequest:
    """A decoded JSON body of `/detokenize`; raises `APIError` (400) naming the field."""
    values = read_fields(DETOKENIZE_FIELDS, body, rules.defaults, rules.unknown)
    return DetokenizeRequest(values["model"], values["tokens"])


def _or_none(count: int | None) -> int:
    return -1 if count is None else count


def _options(
    values: Mapping[str, Any], logprobs: int, prompt_logprobs: int, length_field: str = "max_tokens"
) -> RequestOptions:
    return RequestOptions(
        n=values["n"],
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        cache_salt=values["cache_salt"],
        priority=values["priority"],
        deadline_ms=-1 if values["deadline_ms"] is None else values["deadline_ms"],
        length_field=length_field,
    )


def _form(values: Mapping[str, Any], logprobs: int) -> AnswerForm:
    stream, stream_options = values["stream"], values["stream_options"]
    if stream_options is not None and not stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    if stream and values["prompt_logprobs"] is not None:
        raise bad_request("prompt_logprobs cannot be streamed; leave stream out", "prompt_logprobs")
    return AnswerForm(
        stream=stream,
        include_usage=bool(stream_options and stream_options["include_usage"]),
        return_token_ids=values["return_token_ids"],
        logprobs=logprobs >= 0,
        prompt_logprobs=values["prompt_logprobs"] is not None,
        echo=values.get("echo", False),
    )


def _template(values: Mapping[str, Any]) -> TemplateOptions:
    adding, continuing = values["add_generation_prompt"], values["continue_final_message"]
    if adding and continuing:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    kwargs = values["chat_template_kwargs"] or {}
    for name in kwargs:
        if name in RESERVED_TEMPLATE_NAMES or not name.isidentifier():
            raise bad_request(
                f"chat_template_kwargs has {name[:60]!r}, which is a field of its own or no variable's name",
                "chat_template_kwargs",
            )
    return TemplateOptions(not continuing if adding is None else adding, continuing, kwargs)
