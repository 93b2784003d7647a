"""The server under test: where it is, how it is asked, and what it says before the load begins."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_SET_UP_S = 120.0  # for one short answer before the load begins


class BenchError(Exception):
    """A benchmark that cannot begin; one line saying why."""


@dataclass(frozen=True)
class Target:
    """An OpenAI-compatible server, and the fields that every request to it has.

    `address` is the one that the first connection found: no request pays for a name's look-up.
    """

    address: tuple[str, int]
    authority: str  # of the URL, for the Host header
    path: str  # with the base path, such as /v1/completions
    chat: bool
    model: str
    api_key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # None leaves a field out

    def request(self, prompt: str, max_tokens: int, *, stream: bool = True) -> bytes:
        """One whole HTTP request."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "stream": stream}
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        if stream:
            body["stream_options"] = {"include_usage": True}
        body = {name: value for name, value in (body | dict(self.fields)).items() if value is not None}
        payload = json.dumps(body).encode()
        lines = [
            f"POST {self.path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in _headers(self.authority, self.api_key).items()),
            f"Content-Length: {len(payload)}",
            "Connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + payload

    def prompt_tokens(self, prompt: str) -> int | None:
        """How many tokens the server makes of `prompt`, template and all; None if it does not say.

        Raises:
            BenchError: it gave no answer, or refused one of the request's fields.
        """
        head, _, body = self.request(prompt, 1, stream=False).partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
        answer = _ask(self.address, "POST", self.path, headers, body)[0]
        usage = answer.get("usage") if isinstance(answer, dict) else None
        return usage.get("prompt_tokens") if isinstance(usage, dict) else None


def open_target(
    url: str, *, chat: bool, model: str | None, api_key: str | None, fields: Mapping[str, Any]
) -> Target:
    """The server at `url` (with or without `/v1`); `model` None takes the first it lists.

    Raises:
        BenchError: nothing answers there, or it lists no models.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        name, port = parts.hostname, parts.port or 80
    except ValueError as error:
        raise BenchError(f"--url {url}: {error}") from None
    if parts.scheme != "http" or not name:
        raise BenchError(f"--url {url} is no http:// address (https is not supported: measure behind it)")
    base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
    listed, address = _ask((name, port), "GET", f"{base}/models", _headers(parts.netloc, api_key))
    if model is None:
        try:
            model = str(listed["data"][0]["id"])
        except (LookupError, TypeError):
            raise BenchError(f"{url} lists no models: give one with --model") from None
    path = f"{base}/chat/completions" if chat else f"{base}/completions"
    return Target(address, parts.netloc, path, chat, model, api_key, fields)


def _headers(authority: str, api_key: str | None) -> dict[str, str]:
    headers = {"Host": authority, "Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


def _ask(
    address: tuple[str, int], method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
) -> tuple[Any, tuple[str, int]]:
    """The JSON answer, and the address that was reached."""
    connection = http.client.HTTPConnection(*address, timeout=_SET_UP_S)
    where = f"{method} http://{headers['Host']}{path}"
    try:
        connection.connect()
        peer = connection.sock.getpeername()
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise BenchError(f"{where} was answered {answer.status}: {error_message(content)}")
        return json.loads(content), (peer[0], peer[1])
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(f"{where} got no answer: {str(error) or repr(error)}") from None
    except ValueError:
        raise BenchError(f"{where} was answered with no JSON: is it an OpenAI-compatible server?") from None
    finally:
        connection.close()


def error_message(body: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:300]
