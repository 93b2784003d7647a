"""A server of OpenAI's streams that does exactly what a test tells it to, in a thread of this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = "data: [DONE]\n\n"


@dataclass
class Script:
    """How requests are answered: streamed ones by `answer`, which gets the body and the request's number
    and yields pieces of the answer; the count of a plain one's prompt by `prompt_tokens`."""

    answer: Callable[[dict[str, Any], int], Iterator[str | float]]
    prompt_tokens: Callable[[str], int | None] = lambda prompt: len(prompt.split())
    statuses: dict[int, int] = field(default_factory=dict)  # of the requests that do not get a 200
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of the streamed requests so far
    headers: list[dict[str, str]] = field(default_factory=list)


def event(text: str | None = None, finish: str | None = None, **more: Any) -> str:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return f"data: {json.dumps({'choices': choices} | more)}\n\n"


def usage(prompt: int, completion: int, cached: int = 0) -> str:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event(usage=counts)


def words(body: dict[str, Any], _: int = 0) -> Iterator[str | float]:
    """A whole, immediate answer of as many chunks as were asked for."""
    for _ in range(body["max_tokens"]):
        yield event("word ")
    yield event("", "length")
    yield usage(len(body["prompt"].split()), body["max_tokens"])
    yield DONE


def _handler(script: Script) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._whole(200, {"data": [{"id": "fake"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not body["stream"]:
                count = script.prompt_tokens(body.get("prompt") or body["messages"][0]["content"])
                self._whole(200, {"usage": {"prompt_tokens": count}} if count is not None else {})
                return
            with lock:
                number = len(script.bodies)
                script.bodies.append(body)
                script.headers.append(dict(self.headers))
            if (status := script.statuses.get(number, 200)) != 200:
                self._whole(status, {"error": {"message": f"no to request {number}"}})
                return
            self.send_response(200)
            self.end_headers()
            try:
                for piece in script.answer(body, number):
                    if isinstance(piece, float):
                        time.sleep(piece)
                    else:
                        self.wfile.write(piece.encode())
            except OSError:
                pass  # the client has gone

        def _whole(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def fake_server(script: Script) -> Iterator[str]:
    """Its URL. HTTP/1.0: an answer ends with its connection."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(script))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
