"""The OpenAPI page against the server that serves it: schemathesis sends what fits it, and what does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi import checks

from servelite.frontend.protocol import MAX_DEADLINE_MS
from servelite.frontend.sampling import MAX_TOKENS
from tests.http.server import Server, running_server

FLAGS = ("--executor", "simulated", "--simulated-step-ms", "0", "--max-model-len", "256")
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
FITS, BREAKS = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("openapi"), *FLAGS) as running:
        yield running


def page_of(server: Server) -> dict[str, Any]:
    status, page = server.get("/openapi.json")
    assert status == 200
    read: dict[str, Any] = json.loads(page)
    return read


def named(context: Any, body: Any) -> Any:
    """A model that there is, so that requests get further than its name; for Messages, which must ask
    for a length, one that fits the context; and no deadline: one that passes is a 503, rightly."""
    if isinstance(body, dict):
        deadline = body.get("deadline_ms")
        if isinstance(deadline, int | float) and 1 <= deadline <= MAX_DEADLINE_MS:
            body["deadline_ms"] = None
        longest = body.get("max_tokens")
        messages = context.operation.path == "/v1/messages"
        if messages and isinstance(longest, int) and 1 <= longest <= MAX_TOKENS:
            body["max_tokens"] = min(longest, 64)
        if isinstance(body.get("model"), str) and len(body["model"]) <= 512:
            body["model"] = "demo"
    return body


def send(server: Server, page: dict[str, Any], each: int) -> Counter[tuple[str, str, int]]:
    """Up to `each` requests a route and kind, each answer checked; how many got which status."""
    schema = schemathesis.openapi.from_dict(page)
    schema.config.update(base_url=server.url)
    schema.hook("map_body")(named)
    told: Counter[tuple[str, str, int]] = Counter()

    def ask(session: requests.Session, case: schemathesis.Case, kind: str) -> None:
        response = case.call(session=session)
        told[case.operation.label, kind, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    settings = hypothesis.settings(
        max_examples=each,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in (FITS, BREAKS) if operation.body else (FITS,):
                case = operation.as_strategy(generation_mode=mode)
                given = hypothesis.given(st.just(session), case, st.just(mode.value))
                settings(given(ask))()
    server.idle_metrics()
    return told


def answered(told: Counter[tuple[str, str, int]]) -> set[str]:
    """The routes of which some request that fits was served."""
    return {label for (label, kind, status) in told if kind == "positive" and status == 200}


def test_answers_are_as_the_page_says(server: Server) -> None:
    told = send(server, page_of(server), 4)
    assert told.total() >= 50 and len(answered(told)) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_2000_requests(server: Server) -> None:
    page = page_of(server)
    told = send(server, page, 130)
    assert told.total() >= 2000
    posts = {f"POST {path}" for path, methods in page["paths"].items() if "post" in methods}
    assert posts <= answered(told)


def _without_400(page: dict[str, Any]) -> str:
    del page["paths"]["/detokenize"]["post"]["responses"]["400"]
    return "/detokenize"


def _another_answer(page: dict[str, Any]) -> str:
    content = page["paths"]["/version"]["get"]["responses"]["200"]["content"]
    content["application/json"]["schema"]["properties"]["version"] = {"type": "integer"}
    return "/version"


def _stricter(page: dict[str, Any]) -> str:
    body = page["components"]["schemas"]["tokenize"]
    body |= {"properties": {"prompt": {"type": "string", "maxLength": 3}}, "required": ["prompt"]}
    return "/tokenize"


@pytest.mark.parametrize("breach", [_without_400, _another_answer, _stricter])
def test_a_page_that_is_wrong_is_found(server: Server, breach: Callable[[dict[str, Any]], str]) -> None:
    page = page_of(server)
    path = breach(page)
    page["paths"] = {path: page["paths"][path]}
    with pytest.raises(FailureGroup):
        send(server, page, 100)
