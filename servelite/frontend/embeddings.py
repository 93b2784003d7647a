"""`/v1/embeddings`: texts or token IDs in, a vector for each out."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from servelite.frontend.body import Receive, Scope, Send, send_json
from servelite.frontend.errors import bad_request
from servelite.frontend.fields import REQUIRED, Custom, Field, Integer, OneOf, read_fields
from servelite.frontend.generation import generating, read_request, watch
from servelite.frontend.pooled import Pooled
from servelite.frontend.prompts import PROMPTS_SCHEMA, Prompt, read_prompts
from servelite.frontend.protocol import (
    COMPLETION_FIELDS,
    PLAIN_RULES,
    BodyRules,
    RequestOptions,
    truncation,
)
from servelite.frontend.service import Service
from servelite.ipc.messages import Pooling

EMBEDDINGS_PATH: Final = "/v1/embeddings"
MAX_DIMENSIONS: Final = 1 << 16
_FLOAT: Final = np.dtype("<f4")
_COMPLETIONS: Final = {f.name: f for f in COMPLETION_FIELDS}

EMBEDDING_FIELDS: Final = (
    Field(
        "input",
        Custom(read_prompts, "string, list of token IDs, or list of either", PROMPTS_SCHEMA),
        REQUIRED,
        "what to embed; each of several texts gets its vector",
    ),
    Field("encoding_format", OneOf(("float", "base64")), "float", "`base64`: of little-endian float32"),
    Field(
        "dimensions",
        Integer(1, MAX_DIMENSIONS),
        None,
        "the vector's first so many numbers, made as long as the whole was; at most what the model's vectors "
        "have",
    ),
    *(
        _COMPLETIONS[name]
        for name in (
            "model",
            "add_special_tokens",
            "truncate_prompt_tokens",
            "truncation_side",
            "cache_salt",
            "priority",
            "deadline_ms",
            "user",
        )
    ),
)


@dataclass(frozen=True)
class EmbeddingRequest:
    """A parsed body."""

    model: str
    inputs: list[Prompt]
    base64: bool
    dimensions: int | None
    add_special_tokens: bool
    options: RequestOptions


def read_embedding(body: Any, rules: BodyRules = PLAIN_RULES) -> EmbeddingRequest:
    """A decoded JSON body; raises `APIError` (400) naming the field."""
    values = read_fields(EMBEDDING_FIELDS, body, rules.defaults, rules.unknown)
    return EmbeddingRequest(
        values["model"],
        values["input"],
        values["encoding_format"] == "base64",
        values["dimensions"],
        values["add_special_tokens"],
        RequestOptions(
            cache_salt=values["cache_salt"],
            priority=values["priority"],
            deadline_ms=-1 if values["deadline_ms"] is None else values["deadline_ms"],
            truncate=truncation(values),
        ),
    )


class Embeddings:
    """The route, as a raw ASGI endpoint: a client that is gone is noticed."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await generating(self._service, scope, send, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        request = await read_request(
            service, scope, receive, lambda body: read_embedding(body, service.rules)
        )
        service.check_model(request.model)
        pooling = service.pooling()
        if request.dimensions is not None and request.dimensions > pooling.size:
            raise bad_request(
                f"dimensions is {request.dimensions}; this model's vectors have {pooling.size}", "dimensions"
            )
        pooled = await service.embed(
            request.inputs, request.options, add_special_tokens=request.add_special_tokens
        )
        watching = asyncio.create_task(watch(receive, pooled.records))
        try:
            await send_json(send, 200, await _body(request, pooled, pooling))
        finally:
            watching.cancel()
            pooled.close()


async def _body(request: EmbeddingRequest, pooled: Pooled, pooling: Pooling) -> bytes:
    """Written while the vectors come: no answer's numbers are written all at once."""
    items: list[bytes] = []
    async for vector in pooled.vectors():
        values = np.frombuffer(vector, _FLOAT)[: request.dimensions]
        if pooling.normalize and (length := np.linalg.norm(values)) > 0:
            values = values / length
        shown = base64.b64encode(values.tobytes()).decode() if request.base64 else values.tolist()
        item = {"object": "embedding", "index": len(items), "embedding": shown}
        items.append(msgspec.json.encode(item))
        await asyncio.sleep(0)
    count = pooled.prompt_tokens
    rest = {"model": request.model, "usage": {"prompt_tokens": count, "total_tokens": count}}
    return b'{"object":"list","data":[' + b",".join(items) + b"]," + msgspec.json.encode(rest)[1:]
