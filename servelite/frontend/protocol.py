"""The request bodies of the API: every field, declared once.

OpenAI's meaning is the contract; where OpenAI is silent the names are vLLM's. A field that is not
declared here is refused by name: nothing is accepted and ignored, except what asks nothing of the
answer (`Harmless`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    OneOf,
    Only,
    String,
    TokenIDs,
    read_fields,
    refuse_unknown,
)
from servelite.frontend.grammars import GUIDED_FIELDS, RESPONSE_FORMAT_SCHEMA, read_response_format
from servelite.frontend.prompts import (
    MESSAGES_SCHEMA,
    PROMPTS_SCHEMA,
    Message,
    Prompt,
    read_messages,
    read_prompts,
)
from servelite.frontend.sampling import MAX_TOKENS, SAMPLING_FIELDS, Sampling
from servelite.frontend.tools import NO_TOOLS, TOOL_FIELDS, ToolUse, tool_use

COMPLETION_MAX_TOKENS: Final = 16  # OpenAI's default of /v1/completions
MAX_CHOICES: Final = 128
MAX_LOGPROBS: Final = 1024
MAX_DEADLINE_MS: Final = 86_400_000
RESERVED_TEMPLATE_NAMES: Final = (
    "self",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
)


@dataclass(frozen=True)
class TemplateOptions:
    """How a chat is written out."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # what else the template sees
    tools: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Truncation:
    """What is kept of a prompt that is longer."""

    tokens: int  # -1: as many as the context leaves beside the answer
    keeps_end: bool = True

    def cut(self, ids: list[int], kept: int) -> list[int]:
        """At most `kept` of the token IDs."""
        return ids[max(len(ids) - kept, 0) :] if self.keeps_end else ids[:kept]


@dataclass(frozen=True)
class RequestOptions:
    """What a request wants of the engine beside its prompt and its `Sampling`."""

    n: int = 1
    logprobs: int = -1  # -1: none; k: those of the chosen token and of the k likeliest
    prompt_logprobs: int = -1
    cache_salt: str = ""
    priority: int = 0
    deadline_ms: int = -1  # from arrival; -1: none
    truncate: Truncation | None = None
    length_field: str = "max_tokens"  # the one that was used
    grammar: str = ""  # what the answer follows, as it travels; "": anything, or `structured_outputs`
    grammar_field: str = "response_format"  # the one that asked for it


@dataclass(frozen=True)
class AnswerForm:
    """How the answer is written."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
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
    tools: ToolUse = NO_TOOLS
    include_reasoning: bool = True
    thinking_token_budget: int | None = None


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed body of `/v1/completions`."""

    model: str
    prompts: list[Prompt]
    sampling: Sampling
    options: RequestOptions
    form: AnswerForm
    add_special_tokens: bool = True


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
    limits_thinking: bool = False  # the model's reasoning ends with a token, so that it can be made to


_OPTIONS_OF_STREAM = (
    Field("include_usage", Boolean(), False, "a last chunk with the token counts"),
    Field("continuous_usage_stats", Boolean(), False, "the choice's counts in every chunk"),
    Field("include_obfuscation", Only((False, True)), None, "accepted; nothing is padded"),
)

_COMMON_FIELDS: Final = (
    Field("model", String(512), REQUIRED, "a name that `/v1/models` lists"),
    Field("n", Integer(1, MAX_CHOICES), 1, "answers a prompt; they share its KV blocks"),
    *SAMPLING_FIELDS,
    Field(
        "response_format",
        Custom(
            read_response_format,
            "object with a type: text, json_object or json_schema",
            RESPONSE_FORMAT_SCHEMA,
        ),
        None,
        "the form of the answer: any JSON object, or one that a JSON Schema describes",
    ),
    *GUIDED_FIELDS,
    Field("stream", Boolean(), False, "send the answer as it comes, as server-sent events"),
    Field("stream_options", Object(_OPTIONS_OF_STREAM), None, "with `stream` only, unless all false"),
    Field(
        "prompt_logprobs",
        Integer(0, MAX_LOGPROBS),
        None,
        "log probabilities of the prompt's tokens and of this many likeliest; not with `stream`",
    ),
    Field("return_token_ids", Boolean(), False, "the token IDs of prompt and answer as well"),
    Field(
        "truncate_prompt_tokens",
        Integer(-1, MAX_TOKENS),
        None,
        "keep only this many of the prompt's tokens; -1: as many as fit beside the answer",
    ),
    Field(
        "truncation_side",
        OneOf(("left", "right")),
        "left",
        "the end that `truncate_prompt_tokens` cuts off: with `left` the last tokens are kept",
    ),
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
    Field("use_beam_search", Only((False,)), None, "beam search"),
    Field("length_penalty", Only((1,)), None, "of beam search"),
    Field("spaces_between_special_tokens", Only((True,)), None, "between control tokens that are shown"),
    Field("vllm_xargs", Only(({},)), None, "arguments of vLLM's plug-ins"),
    Field("guided_decoding_backend", Harmless(), None, "accepted, without effect: there is one"),
    Field("user", Harmless(), None, "accepted, without effect"),
    Field("metadata", Harmless(), None, "accepted, without effect"),
    Field("store", Harmless(), None, "accepted, without effect: nothing is stored"),
    Field("service_tier", Harmless(), None, "accepted, without effect"),
    Field("safety_identifier", Harmless(), None, "accepted, without effect"),
    Field("prompt_cache_key", Harmless(), None, "accepted, without effect"),
    Field("prompt_cache_retention", Harmless(), None, "accepted, without effect"),
    Field("prompt_cache_options", Harmless(), None, "accepted, without effect"),
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

SUMMARY: Final = Field(
    "summary",
    Only(("auto", "concise", "detailed", "none")),
    None,
    "none is written: the reasoning comes as it is",
)

_REASONING_FIELDS: Final = (
    Field("reasoning", Object((SUMMARY,)), None, "with `summary` only, as in the Responses API"),
    Field(
        "reasoning_effort",
        OneOf(("none", "minimal", "low", "medium", "high", "xhigh", "max")),
        None,
        "a variable for the chat template; `none` also sets its `enable_thinking` to false",
    ),
    Field("include_reasoning", Boolean(), True, "false: reasoning that is set apart is left out"),
    Field(
        "thinking_token_budget",
        Integer(0, MAX_TOKENS),
        None,
        "most tokens of reasoning; then its end follows, and the answer",
    ),
)

_MESSAGES: Final = Custom(read_messages, "list of messages", MESSAGES_SCHEMA)

CHAT_FIELDS: Final = (
    Field("messages", _MESSAGES, REQUIRED, "the conversation so far"),
    *_COMMON_FIELDS,
    *_TEMPLATE_FIELDS,
    Field("max_completion_tokens", Integer(1, MAX_TOKENS), None, "absent: to the context's end"),
    Field("max_tokens", Integer(1, MAX_TOKENS), None, "the older name; `max_completion_tokens` wins"),
    Field("logprobs", Boolean(), False, "log probabilities of the answer's tokens"),
    Field("top_logprobs", Integer(0, 20), None, "and of this many likeliest tokens; needs `logprobs`"),
    *TOOL_FIELDS,
    *_REASONING_FIELDS,
    Field("documents", Only(([],)), None, "texts for the chat template"),
    Field("best_of", Only((1,)), None, "answers to choose from"),
    Field("echo", Only((False,)), None, "the last message before the answer"),
    Field("functions", Only(([],)), None, "the older name of `tools`"),
    Field("function_call", Only(("none", "auto")), None, "without functions both mean the same"),
    Field("modalities", Only((["text"],)), None, "kinds of answer"),
    Field("verbosity", OneOf(("low", "medium", "high")), None, "a variable for the chat template"),
    Field("prediction", Harmless(), None, "accepted, without effect: it would only make the answer faster"),
)

_ADD_SPECIAL_TOKENS: Final = Field(
    "add_special_tokens",
    Boolean(),
    True,
    "BOS and EOS as the model has them, for a text; false: only a BOS that the text itself begins with",
)

COMPLETION_FIELDS: Final = (
    Field(
        "prompt",
        Custom(read_prompts, "string, list of token IDs, or list of either", PROMPTS_SCHEMA),
        REQUIRED,
        "what to continue; a control token that is spelled out in a text stays text: give its ID for it",
    ),
    *_COMMON_FIELDS,
    Field(
        "max_tokens",
        Integer(0, MAX_TOKENS),
        COMPLETION_MAX_TOKENS,
        "longest answer, in tokens; 0 writes none: with `echo` and `logprobs` the prompt is scored",
    ),
    _ADD_SPECIAL_TOKENS,
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
    Field("messages", _MESSAGES, None, "a chat; this or `prompt`"),
    _ADD_SPECIAL_TOKENS,
    *_TEMPLATE_FIELDS,
    TOOL_FIELDS[0],
    Field("return_token_strs", Boolean(), False, "the tokens' texts as well"),
)

DETOKENIZE_FIELDS: Final = (
    Field("model", String(512), None, "a name that `/v1/models` lists"),
    Field("tokens", TokenIDs(1 << 20), REQUIRED, "token IDs"),
)

RENDER_PATH: Final = "/v1/chat/completions/render"

PLAIN_RULES: Final = BodyRules()


def read_chat(body: Any, rules: BodyRules = PLAIN_RULES) -> ChatRequest:
    """A decoded JSON body as a chat request; raises `APIError` (400) naming the field."""
    values = read_fields(CHAT_FIELDS, body, rules.defaults, rules.unknown)
    longer, shorter = values["max_completion_tokens"], values["max_tokens"]
    max_tokens = shorter if longer is None else longer
    if values["top_logprobs"] is not None and not values["logprobs"]:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    logprobs = (values["top_logprobs"] or 0) if values["logprobs"] else -1
    tools = tool_use(values)
    return ChatRequest(
        values["model"],
        values["messages"],
        _template(values, tools.tools),
        Sampling.from_fields(values, max_tokens),
        _options(
            values,
            logprobs,
            _or_none(values["prompt_logprobs"]),
            "max_tokens" if longer is None else "max_completion_tokens",
        ),
        _form(values, logprobs),
        tools,
        values["include_reasoning"],
        values["thinking_token_budget"],
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
        values["add_special_tokens"],
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
        _template(values, tuple((values["tools"] or {}).values())),
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
    grammar, grammar_field = _grammar(values)
    return RequestOptions(
        n=values["n"],
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        cache_salt=values["cache_salt"],
        priority=values["priority"],
        deadline_ms=-1 if values["deadline_ms"] is None else values["deadline_ms"],
        truncate=truncation(values),
        length_field=length_field,
        grammar=grammar,
        grammar_field=grammar_field,
    )


def truncation(values: Mapping[str, Any]) -> Truncation | None:
    """What the two fields about it say; raises `APIError` (400)."""
    tokens = values["truncate_prompt_tokens"]
    if tokens == 0:
        raise bad_request("truncate_prompt_tokens is 0: no token is left", "truncate_prompt_tokens")
    return None if tokens is None else Truncation(tokens, values["truncation_side"] == "left")


def _grammar(values: Mapping[str, Any]) -> tuple[str, str]:
    """What the answer follows, and the field that says so; "" for `structured_outputs`: it is part of the
    `Sampling`."""
    names = ("structured_outputs", "response_format", *(f.name for f in GUIDED_FIELDS))
    given = {name: values[name] for name in names if values[name]}
    if len(set(given.values())) > 1:
        raise bad_request(f"give {' or '.join(given)}, not both", next(reversed(given)))
    name = next(iter(given), "response_format")
    return "" if name == "structured_outputs" else values[name] or "", name


def _form(values: Mapping[str, Any], logprobs: int) -> AnswerForm:
    stream, stream_options = values["stream"], values["stream_options"]
    if not stream and any((stream_options or {}).values()):
        raise bad_request("stream_options needs stream: true", "stream_options")
    usage = stream_options or {"include_usage": False, "continuous_usage_stats": False}
    if stream and values["prompt_logprobs"] is not None:
        raise bad_request("prompt_logprobs cannot be streamed; leave stream out", "prompt_logprobs")
    return AnswerForm(
        stream=stream,
        include_usage=usage["include_usage"],
        continuous_usage=usage["continuous_usage_stats"],
        return_token_ids=values["return_token_ids"],
        logprobs=logprobs >= 0,
        prompt_logprobs=values["prompt_logprobs"] is not None,
        echo=bool(values.get("echo")),
    )


def _template(values: Mapping[str, Any], tools: Sequence[dict[str, Any]]) -> TemplateOptions:
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
    if values.get("reasoning_effort") == "none":
        kwargs = {"enable_thinking": False} | kwargs
    for name in ("reasoning_effort", "verbosity"):
        given = values.get(name)
        if given is not None and kwargs.get(name, given) != given:
            raise bad_request(f"{name} differs from that of chat_template_kwargs", name)
        kwargs = kwargs if given is None else kwargs | {name: given}
    return TemplateOptions(not continuing if adding is None else adding, continuing, kwargs, tools)
