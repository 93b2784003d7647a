"""Every field of every endpoint, from its declaration: default, bounds, beyond, wrong types, null."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from servelite.frontend.anthropic.request import read_count, read_message_request
from servelite.frontend.embeddings import read_embedding
from servelite.frontend.endpoints import ENDPOINTS
from servelite.frontend.errors import APIError
from servelite.frontend.fields import REQUIRED, Field, Refused
from servelite.frontend.protocol import (
    PLAIN_RULES,
    RENDER_PATH,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from servelite.frontend.responses.request import read_response
from servelite.frontend.sampling import MAX_TOKENS
from tests.frontend.field_cases import ADD, HI, cases
from tests.frontend.translated_fields import TRANSLATED_COMPANIONS

READERS: dict[str, Callable[[Any], Any]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/embeddings": read_embedding,
    "/tokenize": read_tokenize,
    "/detokenize": read_detokenize,
    RENDER_PATH: read_chat,
    "/v1/responses": lambda body: read_response(body, PLAIN_RULES).chat,
    "/v1/messages": lambda body: read_message_request(body, PLAIN_RULES).chat,
    "/v1/messages/count_tokens": lambda body: read_count(body, PLAIN_RULES),
}
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "demo", "messages": HI},
    "/v1/completions": {"model": "demo", "prompt": "hi"},
    "/v1/embeddings": {"model": "demo", "input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    RENDER_PATH: {"model": "demo", "messages": HI},
    "/v1/responses": {"model": "demo", "input": "hi"},
    "/v1/messages": {"model": "demo", "messages": HI, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "demo", "messages": HI},
}
# What else a body must say for a field to mean anything; None takes a field out.
COMPANIONS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"max_tokens": MAX_TOKENS},
    "messages": {"prompt": None},
    "tool_choice": {"tools": [ADD]},
}
FIELDS = [(path, field) for path, fields in ENDPOINTS.items() for field in fields]


def body_of(path: str, field: Field, value: Any) -> dict[str, Any]:
    known = {f.name for f in ENDPOINTS[path]}
    companions = TRANSLATED_COMPANIONS.get((path, field.name), COMPANIONS.get(field.name, {}))
    more = {k: v for k, v in companions.items() if k in known}
    return PLAIN[path] | more | {field.name: value}


@pytest.mark.parametrize(("path", "field"), FIELDS, ids=[f"{path}-{field.name}" for path, field in FIELDS])
def test_a_field(path: str, field: Field) -> None:
    read = READERS[path]
    kinds = set()
    for case in cases(field):
        kinds.add((case.kind, case.taken))
        body = body_of(path, field, case.value)
        if case.taken:
            read(body)
            continue
        with pytest.raises(APIError) as caught:
            read(body)
        error, text = caught.value, f"{case.kind}: {str(case.value)[:100]}"
        assert error.status == 400, text
        assert error.param is not None and error.param.startswith(field.name), (text, error.param)
        assert error.param in error.message, text
        assert all(limit in error.message for limit in case.limits), (text, error.message)
        assert len(error.message) < 400, text
    assert any(taken for _, taken in kinds) != isinstance(field.type, Refused)
    # null is absence: the default, or the error for a required field.
    present = body_of(path, field, None)
    absent = {k: v for k, v in present.items() if k != field.name}
    if field.default is REQUIRED:
        for body in (present, absent):
            with pytest.raises(APIError) as caught:
                read(body)
            assert (caught.value.param, caught.value.code) == (field.name, "missing_field")
    elif field.name in ("prompt", "messages"):  # of /tokenize: one of the two is needed
        with pytest.raises(APIError):
            read({})
    else:
        assert read(present) == read(absent)


def test_a_default_is_a_value_the_field_could_have() -> None:
    for _, field in FIELDS:
        if field.default not in (REQUIRED, None, ()):
            assert field.type.read(field.name, field.default) == field.default
