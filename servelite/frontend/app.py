"""The HTTP routes. What streams is raw ASGI (`generation.py`), the rest is FastAPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

import servelite
from servelite.frontend.body import ClientGone, decode_json, read_body
from servelite.frontend.errors import APIError
from servelite.frontend.generation import Generation
from servelite.frontend.middleware import BodyDiscard, KeyCheck, RequestID
from servelite.frontend.protocol import BodyRules, read_detokenize, read_tokenize
from servelite.frontend.service import Service
from servelite.observability.metrics import CONTENT_TYPE

_T = TypeVar("_T")


def make_app(service: Service) -> FastAPI:
    """The application around one service."""
    app = FastAPI(
        title="servelite", version=servelite.__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    if service.settings.api_key:
        app.add_middleware(KeyCheck, keys=service.settings.api_key, refused=service.metrics.refused)
    app.add_middleware(BodyDiscard, limit=service.settings.max_body_bytes)
    app.add_middleware(RequestID)  # added last: it is outermost, so that refusals have an ID too
    for path, chat in (("/v1/chat/completions", True), ("/v1/completions", False)):
        app.router.routes.append(Route(path, Generation(service, chat=chat), methods=["POST"]))
    _add_models(app, service)
    _add_tokenizing(app, service)
    _add_health(app, service)
    _add_errors(app, service)
    return app


def _json(status: int, value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _error(error: APIError) -> Response:
    return Response(error.body(), error.status, dict(error.headers), "application/json")


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        facts = service.engine.facts
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "servelite",
        }
        return card | ({"max_model_len": facts.max_model_len} if facts else {})

    async def models() -> Response:
        return _json(200, {"object": "list", "data": [card(name) for name in service.names]})

    async def model(name: str) -> Response:
        service.check_model(name)
        return _json(200, card(name))

    app.add_api_route("/v1/models", models)
    app.add_api_route("/v1/models/{name:path}", model)


def _add_tokenizing(app: FastAPI, service: Service) -> None:
    """vLLM's `/tokenize` and `/detokenize`."""

    async def read(request: Request, reader: Callable[[Any, BodyRules], _T]) -> _T:
        reading = read_body(request.scope, request.receive, service.settings.max_body_bytes)
        body = await service.lifecycle.arrival(reading)
        return await service.preparation.parse(lambda: reader(decode_json(body), service.rules), len(body))

    async def tokenize(request: Request) -> Response:
        asked = await read(request, read_tokenize)
        if asked.model is not None:
            service.check_model(asked.model)
        preparation = service.preparation
        if asked.messages is not None:
            tokens = await preparation.tokenize_chat(asked.messages, asked.template)
        else:
            tokens = await preparation.tokenize(
                asked.prompt or "", add_special_tokens=asked.add_special_tokens
            )
        pieces = None
        if asked.return_token_strs:
            pieces = await preparation.token_texts(tokens)
        return _json(
            200,
            {
                "count": len(tokens),
                "max_model_len": service.facts.max_model_len,
                "tokens": tokens,
                "token_strs": pieces,
            },
        )

    async def detokenize(request: Request) -> Response:
        asked = await read(request, read_detokenize)
        if asked.model is not None:
            service.check_model(asked.model)
        return _json(200, {"prompt": await service.preparation.detokenize(asked.tokens)})

    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])


def _add_health(app: FastAPI, service: Service) -> None:
    async def live() -> Response:
        return _json(200, {"status": "live"})

    async def ready() -> Response:
        if service.lifecycle.ready:
            return _json(200, {"status": "ready"})
        return _json(503, {"status": service.lifecycle.state})

    async def version() -> Response:
        return _json(200, {"version": servelite.__version__})

    async def metrics() -> Response:
        return Response(service.metrics.expose(), media_type=CONTENT_TYPE)

    for path, probe in (("/health/live", live), ("/health/ready", ready), ("/health", ready)):
        app.add_api_route(path, probe, methods=["GET", "HEAD"])  # some balancers only ask for the head
    app.add_api_route("/version", version)
    app.add_api_route("/metrics", metrics)


def _add_errors(app: FastAPI, service: Service) -> None:
    """Every error has OpenAI's body, those of the framework too."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        service.metrics.refused(error.code or str(error.status))
        return _error(error)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return _error(APIError(error.status_code, text, headers=tuple((error.headers or {}).items())))

    async def unexpected(request: Request, error: Exception) -> Response:
        return _error(APIError(500, "The server met an unexpected error; its log has the details."))

    app.add_exception_handler(APIError, api_error)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
