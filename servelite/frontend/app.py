"""The HTTP routes. What streams is raw ASGI (`generation.py`), the rest is FastAPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

import servelite
from servelite.frontend.anthropic import request as anthropic
from servelite.frontend.body import ClientGone
from servelite.frontend.cors import CrossOrigin
from servelite.frontend.embeddings import EMBEDDINGS_PATH, Embeddings
from servelite.frontend.errors import ANTHROPIC_PATH, APIError
from servelite.frontend.generation import Generation, read_request
from servelite.frontend.middleware import BodyDiscard, KeyCheck, RequestID
from servelite.frontend.openapi import OPENAPI_PATH, openapi_page
from servelite.frontend.preparation import truncated
from servelite.frontend.protocol import RENDER_PATH, BodyRules, read_chat, read_detokenize, read_tokenize
from servelite.frontend.responses import request as responses
from servelite.frontend.service import Service
from servelite.frontend.translated import TranslatedChat, renamed
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
    if service.settings.allowed_origins:
        app.add_middleware(CrossOrigin, origins=service.settings.allowed_origins)
    app.add_middleware(RequestID)  # added last: it is outermost, so that refusals have an ID too
    for path, endpoint in (
        ("/v1/chat/completions", Generation(service, chat=True)),
        ("/v1/completions", Generation(service, chat=False)),
        (EMBEDDINGS_PATH, Embeddings(service)),
        ("/v1/responses", TranslatedChat(service, responses.read_response, responses.NAMES)),
        (ANTHROPIC_PATH, TranslatedChat(service, anthropic.read_message_request, anthropic.NAMES)),
    ):
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    _add_models(app, service)
    _add_tokenizing(app, service)
    _add_health(app, service)
    _add_page(app, service)
    _add_errors(app, service)
    return app


def _json(status: int, value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _error(request: Request, error: APIError) -> Response:
    body = error.body_for(request.url.path)
    return Response(body, error.status, dict(error.headers), "application/json")


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
    """vLLM's `/tokenize`, `/detokenize`, and a chat's dry run: the prompt that it would be."""

    async def read(request: Request, reader: Callable[[Any, BodyRules], _T]) -> _T:
        return await read_request(
            service, request.scope, request.receive, lambda body: reader(body, service.rules)
        )

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

    async def render(request: Request) -> Response:
        asked = await read(request, read_chat)
        service.check_model(asked.model)
        text, tokens = await service.preparation.rendered(asked.messages, asked.template)
        tokens = truncated(tokens, asked.options.truncate, asked.sampling, service.facts.max_model_len)
        return _json(
            200,
            {
                "prompt": text,
                "prompt_token_ids": tokens,
                "count": len(tokens),
                "max_model_len": service.facts.max_model_len,
            },
        )

    async def count(request: Request) -> Response:
        asked = await read(request, anthropic.read_count)
        service.check_model(asked.model)
        with renamed(anthropic.NAMES):
            _, tokens = await service.preparation.rendered(asked.messages, asked.template)
        return _json(200, {"input_tokens": len(tokens)})

    async def detokenize(request: Request) -> Response:
        asked = await read(request, read_detokenize)
        if asked.model is not None:
            service.check_model(asked.model)
        return _json(200, {"prompt": await service.preparation.detokenize(asked.tokens)})

    app.add_api_route(f"{ANTHROPIC_PATH}/count_tokens", count, methods=["POST"])
    app.add_api_route(RENDER_PATH, render, methods=["POST"])
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


def _add_page(app: FastAPI, service: Service) -> None:
    """Added last: it describes every route."""

    async def page(request: Request) -> Response:
        return Response(body, media_type="application/json")

    app.add_api_route(OPENAPI_PATH, page)
    settings = service.settings
    body = openapi_page(
        app.routes,
        keys=bool(settings.api_key),
        passes_unknown=settings.unknown_fields == "warn",
        defaults=service.sampling_defaults,
    )


def _add_errors(app: FastAPI, service: Service) -> None:
    """Every error has OpenAI's body, those of the framework too."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        service.metrics.refused(error.code or str(error.status))
        return _error(request, error)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.url.path[:200]}: {error.detail}"
        headers = tuple((error.headers or {}).items())
        return _error(request, APIError(error.status_code, text, headers=headers))

    async def unexpected(request: Request, error: Exception) -> Response:
        return _error(request, APIError(500, "The server met an unexpected error; its log has the details."))

    app.add_exception_handler(APIError, api_error)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
