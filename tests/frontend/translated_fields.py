"""Values of the fields of `/v1/responses` and `/v1/messages` that have readers of their own."""

from __future__ import annotations

from typing import Any, Final

from servelite.frontend.anthropic.fields import MESSAGES_FIELDS
from servelite.frontend.fields import Custom, Field, Object
from servelite.frontend.prompts import MAX_MESSAGES
from servelite.frontend.responses.fields import LOGPROBS, RESPONSES_FIELDS
from servelite.frontend.tools import MAX_TOOLS

SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}}
FLAT: Final = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
CUSTOM: Final = {"type": "custom", "name": "patch"}
GRAMMAR: Final = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
TOOL: Final = {"name": "add", "description": "adds", "input_schema": SCHEMA}
CALL: Final = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'}
OUTPUT: Final = {"type": "function_call_output", "call_id": "c", "output": "2"}
CUSTOM_CALL: Final = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"}
USE: Final = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
RESULT: Final = {"type": "tool_result", "tool_use_id": "c", "content": "2"}
DOCUMENT: Final = {"type": "text", "media_type": "text/plain", "data": "d"}
NOT_LISTS: Final[tuple[Any, ...]] = (1, True, {}, [])


def user(*blocks: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": list(blocks)}


def text(value: Any = "hi", kind: str = "text") -> dict[str, Any]:
    """A block or part with text."""
    return {"type": kind, "text": value}


_BY_FIELD: Final[dict[tuple[str, str], tuple[tuple[Any, ...], tuple[Any, ...]]]] = {
    ("responses", "input"): (
        (
            "",
            "hi",
            [{"role": "user", "content": "hi"}],
            [{"role": "developer", "content": [text(kind="input_text")]}, user(text(kind="input_text"))],
            [
                user(text()),
                {"type": "reasoning", "summary": [], "content": [text("hm", "reasoning_text")]},
                CALL,
                OUTPUT | {"output": [text("2", "input_text")]},
            ],
            [
                {"type": "reasoning", "summary": [], "content": [text("hm")], "encrypted_content": None},
                CALL | {"parsed_arguments": {"a": 1}, "namespace": "n", "caller": {"type": "direct"}},
                CUSTOM_CALL,
                CUSTOM_CALL | {"type": "custom_tool_call_output", "input": None, "output": "done"},
            ],
            [{"role": "assistant", "content": [text("1", "output_text") | {"parsed": 1, "annotations": []}]}],
            [{"role": "assistant", "content": "a", "phase": "commentary"}, user(text(kind="input_text"))],
            [{"type": None, "role": "user", "content": "hi"}],
            [{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            [{"role": "user", "content": "hi"}] * MAX_MESSAGES,
        ),
        (
            *NOT_LISTS,
            [1],
            [{"role": "user"}],
            [{"role": "tool", "content": "x"}],
            [{"role": "user", "content": 1}],
            [{"role": "user", "content": [1]}],
            [{"role": "user", "content": "x", "phase": "odd"}],
            [{"role": "user", "content": "x", "odd": 1}],
            [user({"type": "input_image", "image_url": "data:"})],
            [user({"type": "input_file", "file_id": "f"})],
            [user({"type": "input_nothing"})],
            [user(text(1, "input_text"))],
            [{"type": "odd"}],
            [{"type": "item_reference", "id": "x"}],
            [{"type": "local_shell_call", "call_id": "c", "action": {"type": "exec"}}],
            [{"type": "local_shell_call_output", "id": "c", "output": "x"}],
            [{"type": "web_search_call", "id": "w", "status": "completed"}],
            [{"type": "compaction", "encrypted_content": "x"}],
            [{"type": "additional_tools", "role": "developer", "tools": []}],
            [CUSTOM_CALL | {"input": {}}],
            [CUSTOM_CALL | {"name": None}],
            [CALL | {"namespace": 1}],
            [CALL | {"arguments": {}}],
            [CALL | {"call_id": None}],
            [CALL | {"name": None}],
            [OUTPUT | {"output": None}],
            [{"type": "reasoning", "content": [text("hm", "reasoning_text")], "summary": 0}],
            [{"role": "user", "content": "hi"}] * (MAX_MESSAGES + 1),
        ),
    ),
    ("responses", "tools"): (
        (
            [],
            [FLAT],
            [{"type": "function", "name": "f"}],
            [
                FLAT
                | {"defer_loading": True, "allowed_callers": ["direct"], "output_schema": {}, "async": False}
            ],
            [CUSTOM, CUSTOM | {"name": "c", "description": "x", "format": {"type": "text"}}],
            [FLAT, {"type": "namespace", "name": "n", "description": "x", "tools": [FLAT, CUSTOM]}],
        ),
        (
            1,
            {},
            [1],
            [{"type": "web_search"}],
            [CUSTOM | {"format": GRAMMAR}],
            [CUSTOM | {"parameters": SCHEMA}],
            [{"type": "namespace", "name": "n"}],
            [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}],
            [FLAT | {"odd": 1}],
            [FLAT | {"name": ""}],
            [FLAT, FLAT],
            [FLAT] * (MAX_TOOLS + 1),
        ),
    ),
    ("responses", "tool_choice"): (
        (
            *("none", "auto", "required", {"type": "function", "name": "add"}),
            {"type": "function", "name": "add", "namespace": None},
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
        ),
        (
            *("odd", 1, [], {}, {"type": "function"}, {"type": "function", "name": "nope"}, {"type": "mcp"}),
            *({"type": "custom", "name": "add"}, {"type": "allowed_tools"}),
            {"type": "function", "name": "add", "namespace": "n"},
            {"type": "allowed_tools", "mode": "odd", "tools": []},
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "nope"}]},
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]},
        ),
    ),
    ("responses", "include"): (
        ([], [LOGPROBS], ["reasoning.encrypted_content", "file_search_call.results"]),
        (1, "x", {}, ["odd"], [1], [[]], [LOGPROBS] * 17),
    ),
    ("responses", "format"): (
        ({"type": "text"},),
        ("text", 1, [], {}, {"type": "odd"}, {"type": "text", "odd": 1}),
    ),
    ("messages", "messages"): (
        (
            [{"role": "user", "content": "hi"}],
            [user(text(), text()), user(text())],
            [user(text()), {"role": "assistant", "content": [USE]}, user(RESULT, text())],
            [
                user(text()),
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text()]},
            ],
            [user(text()), {"role": "system", "content": [text()], "clear_at": "never"}],
            [user({"type": "document", "source": DOCUMENT})],
            [user(RESULT | {"content": [text(), {"type": "tool_reference", "tool_name": "add"}]})],
            [{"role": "user", "content": "hi"}] * MAX_MESSAGES,
        ),
        (
            "hi",
            *NOT_LISTS,
            [1],
            [{}],
            [{"role": "user"}],
            [{"role": "system", "content": "x"}],
            [{"role": "user", "content": 1}],
            [{"role": "user", "content": "x", "odd": 1}],
            [user(1)],
            [user({"type": "image", "source": {}})],
            [user({"type": "document", "source": {"type": "base64", "data": ""}})],
            [user({"type": "document", "source": DOCUMENT, "citations": {"enabled": True}})],
            [user(RESULT | {"content": [{"type": "image", "source": {}}]})],
            [user(RESULT | {"is_error": 1})],
            [user(text()), {"role": "system", "content": "x", "clear_at": "odd"}],
            [user(USE)],
            [user(text(1))],
            [user(text() | {"odd": 1})],
            [user(RESULT | {"tool_use_id": 1})],
            [user(RESULT | {"content": 0})],
            [user(), {"role": "assistant", "content": []}],
            [{"role": "assistant", "content": [USE | {"input": "x"}]}],
            [{"role": "user", "content": "hi"}] * (MAX_MESSAGES + 1),
        ),
    ),
    ("messages", "system"): (
        ("", "x", [text()], [text() | {"cache_control": {"type": "ephemeral"}}]),
        (1, {}, [1], [{"type": "image"}], [text(1)]),
    ),
    ("messages", "tools"): (
        (
            [],
            [TOOL | {"name": "n" * 128}],
            [TOOL | {"input_schema": {"type": ["object", "null"], "properties": None}}],
            [TOOL | {"type": "custom", "strict": True, "cache_control": {}, "defer_loading": True}],
            [TOOL | {"allowed_callers": ["direct"], "input_examples": [{"a": 1}], "strict": None}],
        ),
        (
            1,
            {},
            [1],
            [{"name": "add"}],
            [TOOL | {"type": "bash_20250124"}],
            [TOOL | {"odd": 1}],
            [TOOL, TOOL],
            [TOOL] * (MAX_TOOLS + 1),
        ),
    ),
    ("messages", "tool_choice"): (
        (
            {"type": "auto"},
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "none"},
            {"type": "tool", "name": "add"},
        ),
        (
            *("auto", 1, [], {}, {"type": "tool"}, {"type": "tool", "name": "nope"}),
            *({"type": "auto", "name": "add"}, {"type": "auto", "odd": 1}),
            {"type": "auto", "disable_parallel_tool_use": 1},
        ),
    ),
    ("messages", "thinking"): (
        (
            {"type": "disabled"},
            {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
            {"type": "adaptive", "display": "omitted", "block_binding": {}},
        ),
        (
            *(1, [], {}, {"type": "odd"}, {"type": "enabled", "budget_tokens": 1023}),
            *({"type": "enabled", "budget_tokens": True}, {"type": "adaptive", "display": "odd"}),
        ),
    ),
    ("messages", "format"): (
        ({"type": "json_schema", "schema": SCHEMA},),
        (1, [], {}, {"type": "text"}, {"type": "json_schema", "schema": 1}),
    ),
    ("messages", "top_p"): ((0.5, 1, -1, -1.0), (0, 1.1, -2, "1", True, [], {})),
    ("messages", "edits"): (
        (
            [],
            [{"type": "clear_thinking_20251015", "keep": "all"}],
            [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}],
        ),
        (1, "x", {}, [1], [{"type": "compact_20260112"}], [{"type": "clear_thinking_20251015", "odd": 1}]),
    ),
}
"""By the API and the field's name: values that are taken, values that are refused."""


def _all(fields: tuple[Field, ...]) -> dict[str, Field]:
    """By name, those inside objects too."""
    found: dict[str, Field] = {}
    for field in fields:
        found[field.name] = field
        if isinstance(field.type, Object):
            found |= {k: v for k, v in _all(field.type.fields).items() if isinstance(v.type, Custom)}
    return found


def _words(fields: tuple[Field, ...], name: str) -> str:
    kind = _all(fields)[name].type
    assert isinstance(kind, Custom)
    return kind.words


_FIELDS: Final = {"responses": RESPONSES_FIELDS, "messages": MESSAGES_FIELDS}
TRANSLATED: Final = {_words(_FIELDS[api], name): values for (api, name), values in _BY_FIELD.items()}
"""By the words that describe the field's type, which no two of them share."""

TRANSLATED_COMPANIONS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("/v1/responses", "tool_choice"): {"tools": [FLAT]},
    ("/v1/responses", "top_logprobs"): {"include": [LOGPROBS]},
    ("/v1/messages", "tool_choice"): {"tools": [TOOL]},
    ("/v1/messages", "min_tokens"): {"max_tokens": 1 << 24},
    ("/v1/responses", "min_tokens"): {"max_output_tokens": 1 << 24},
    ("/v1/messages/count_tokens", "tool_choice"): {"tools": [TOOL]},
}
"""What else a body must say for a field to mean anything, by route and field."""
