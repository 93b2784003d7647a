"""The terminal client's way to a server: streaming over HTTP with the standard library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import SplitResult, urlsplit

from servelite.cli.chat import ChatFailed

_CONNECT_S = 10.0


def http_speaker(
    url: str, model: str | None, sampling: dict[str, Any], key: str | None = None
) -> Callable[[list[dict[str, str]]], Iterator[str]]:
    """A speaker that asks the server at `url` (with or without `/v1`).

    Args:
        model: None takes its first.
        key: its API key, if it asks for one.

    Raises:
        ChatFailed: nothing answers there, or it is no OpenAI-compatible server.
    """
    address = urlsplit(url if "//" in url else f"http://{url}")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ChatFailed(f"--url {url} is no http address")
    base = address.path.rstrip("/").removesuffix("/v1") + "/v1"
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    name = model or _first_model(address, base, headers)

    def speak(messages: list[dict[str, str]]) -> Iterator[str]:
        given = {k: v for k, v in sampling.items() if v is not None}
        body = json.dumps({"model": name, "messages": messages, "stream": True, **given})
        return _stream(address, f"{base}/chat/completions", body, headers)

    return speak


def _connect(address: SplitResult) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    return kind(address.netloc, timeout=_CONNECT_S)


def _first_model(address: SplitResult, base: str, headers: dict[str, str]) -> str:
    connection = _connect(address)
    try:
        connection.request("GET", f"{base}/models", headers=headers)
        answer = connection.getresponse()
        if answer.status == 401:
            raise ChatFailed(_message(answer.read()))
        return str(json.load(answer)["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise ChatFailed(f"no answer from {address.geturl()}: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise ChatFailed(f"{address.geturl()} lists no models: is it an OpenAI-compatible server?") from None
    finally:
        connection.close()


def _stream(address: SplitResult, path: str, body: str, headers: dict[str, str]) -> Iterator[str]:
    """The pieces of one answer; closing the iterator closes the connection, and so ends the answer."""
    connection = _connect(address)
    try:
        connection.connect()
        if connection.sock is not None:
            connection.sock.settimeout(None)  # a long prompt or a queue may take its time
        connection.request("POST", path, body.encode(), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ChatFailed(_message(answer.read()))
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield from _piece(json.loads(line[len(b"data: ") :]))
    except (OSError, http.client.HTTPException) as error:
        raise ChatFailed(f"the connection to {address.geturl()} failed: {error}") from None
    finally:
        connection.close()


def _piece(chunk: dict[str, Any]) -> Iterator[str]:
    if "error" in chunk:
        raise ChatFailed(chunk["error"]["message"])
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            yield text


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")
