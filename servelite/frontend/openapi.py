"""The OpenAPI page, made from the routes that there are, the fields that their bodies declare, and the shapes
of what they answer. Version 3.2 is the first that can say what a stream's events are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.routing import BaseRoute, Route

import servelite
from servelite.frontend.answer_shapes import ANTHROPIC_ERROR, ERROR, ROUTES
from servelite.frontend.endpoints import ENDPOINTS
from servelite.frontend.errors import ANTHROPIC_PATH
from servelite.frontend.fields import NO_DEFAULTS, Schema, object_schema
from servelite.frontend.middleware import OPEN_PATHS
from servelite.frontend.shapes import told

OPENAPI_PATH: Final = "/openapi.json"
_OF_ALL: Final = (431, 500)
_OF_BODIES: Final = (400, 404, 408, 413, 415, 503)
_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_NAME: Final = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


def openapi_page(
    routes: Iterable[BaseRoute],
    *,
    keys: bool = False,
    passes_unknown: bool = False,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
) -> bytes:
    """The page as JSON.

    Args:
        keys: requests need one.
        passes_unknown: fields that are not declared are passed over (`--unknown-fields warn`).
        defaults: of sampling fields, where the model's replace the declared ones.

    Raises:
        KeyError: a route is not in `ROUTES`.
    """
    schemas = {_name(path): object_schema(fields, defaults) for path, fields in ENDPOINTS.items()}
    if passes_unknown:
        schemas = _open(schemas)
    schemas |= {"Error": told(ERROR), "AnthropicError": told(ANTHROPIC_ERROR)}
    components: dict[str, Any] = {"schemas": schemas} | ({"securitySchemes": _SCHEMES} if keys else {})
    paths = {
        route.path_format: {
            method.lower(): _operation(
                route.path_format, method, guarded=keys and route.path not in OPEN_PATHS
            )
            for method in sorted(route.methods or ())
        }
        for route in routes
        if isinstance(route, Route)
    }
    info = {"title": "servelite", "version": servelite.__version__}
    return msgspec.json.encode({"openapi": "3.2.0", "info": info, "paths": paths, "components": components})


def _operation(path: str, method: str, *, guarded: bool) -> dict[str, Any]:
    route = ROUTES[path]
    error = _json(_ref("AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"))
    errors = [*_OF_ALL, *(_OF_BODIES if path in ENDPOINTS else ()), *([401] if guarded else [])]
    content = (
        {"text/plain": {"schema": {"type": "string"}}} if route.whole is None else _json(told(route.whole))
    )
    if route.event is not None:
        content["text/event-stream"] = {"itemSchema": _event(told(route.event))}
    contents = {200: content} | dict.fromkeys(errors, error)
    contents |= {status: _json(told(shape)) for status, shape in route.others.items()}
    responses = {}
    for status, content in sorted(contents.items()):
        shown = {} if method == "HEAD" else {"content": content}
        responses[str(status)] = {"description": HTTPStatus(status).phrase} | shown
    operation: dict[str, Any] = {"summary": route.summary, "operationId": f"{method.lower()}_{_name(path)}"}
    if path in ENDPOINTS:
        operation["requestBody"] = {"required": True, "content": _json(_ref(_name(path)))}
    if "{name}" in path:
        operation["parameters"] = [_NAME]
    if guarded:
        operation["security"] = [{name: []} for name in _SCHEMES]
    return operation | {"responses": responses}


def _open(schema: Any) -> Any:
    """The same, but that objects whose other fields may only be null, or empty, may have any others."""
    if isinstance(schema, list):
        return [_open(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    opened = {name: _open(one) for name, one in schema.items()}
    others = schema.get("additionalProperties", {})
    if others.get("type") == "null" or None in others.get("enum", ()):
        opened["additionalProperties"] = True
    return opened


def _event(schema: Schema) -> Schema:
    """The schema of a server-sent event whose data is JSON, or the word at the end of OpenAI's streams."""
    data = {"contentMediaType": "application/json", "contentSchema": schema}
    of_data = {"if": {"const": "[DONE]"}, "else": data, "type": "string"}
    return {"type": "object", "properties": {"data": of_data}, "required": ["data"]}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _name(path: str) -> str:
    """A path as a name: of its operation, and of its body's schema."""
    return "_".join(word.strip("{}.") for word in path.replace(".", "/").split("/") if word)


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
