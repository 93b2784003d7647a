"""A server under test: requests to it, and what holds of every answer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from tests.conformance.answers import Answer, streamed, whole
from tests.conformance.sse import Events, read_events, strict_json
from tests.http.server import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0}

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo"]},
                "unit": {"type": "string", "enum": ["c", "f"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ASKING: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"choice": ["a", "b"]}},
    "tools": {"tools": [TOOL]},
    "add_special_tokens": {"add_special_tokens": False},
}
"""Fields that a server may lack, each with a value that asks for what it is there for."""

_T = TypeVar("_T")


def given_url() -> str:
    """The server that the tests are to run against; empty: own ones."""
    return os.environ.get("SERVELITE_BASE_URL", "")


class Target:
    """One server, ours or any other. `own`: the one started for these tests, None for a given URL."""

    def __init__(self, url: str, *, key: str = "", own: Server | None = None) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url, self.key, self.own = url.rstrip("/"), key, own
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=60, limits=limits)
        card = self.get("/v1/models").json()["data"][0]
        self.model: str = card["id"]
        self.max_model_len: int = card["max_model_len"]
        self._processes = self.processes()

    def close(self) -> None:
        self.client.close()

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        """Bytes are sent as they are, as JSON; a dict gets the model's name if it has none."""
        sent = {"content-type": "application/json"} | (headers or {})
        if isinstance(body, bytes):
            return self.client.post(path, content=body, headers=sent)
        return self.client.post(path, json={"model": self.model} | body, headers=sent)

    def events(self, path: str, body: dict[str, Any]) -> Events:
        """A stream, usage included, read to its end."""
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        reply = self.post(path, asked)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        return read_events(reply.content)

    def plain(self, path: str, body: dict[str, Any]) -> Answer:
        """A whole answer."""
        reply = self.post(path, body)
        assert reply.status_code == 200, reply.text
        return whole(strict_json(reply.content))

    def stream(self, path: str, body: dict[str, Any]) -> Answer:
        """A stream's answer."""
        return streamed(self.events(path, body))

    def both(self, path: str, body: dict[str, Any]) -> Answer:
        """The plain answer, which its stream twin equals in text, calls, finish reason and usage."""
        plain, stream = self.plain(path, body), self.stream(path, body)
        assert [choice.text for choice in stream.choices] == [choice.text for choice in plain.choices]
        for mine, theirs in zip(stream.choices, plain.choices, strict=True):
            assert mine.finish_reason == theirs.finish_reason and mine.reasoning == theirs.reasoning
            calls = [[(call.name, call.arguments) for call in each.calls] for each in (mine, theirs)]
            assert calls[0] == calls[1]
        assert stream.counts == plain.counts
        return plain

    def refused(
        self, path: str, body: Any, *, statuses: tuple[int, ...] = (400,), seconds: float = 5.0
    ) -> dict[str, Any]:
        """The error of a request that is refused, plain and as a stream, by a whole answer in time."""
        forms = [body]
        if isinstance(body, dict):
            forms = [body | {"stream": False}, body | {"stream": True}] if "stream" not in body else [body]
        for form in forms:
            begun = time.monotonic()
            reply = self.post(path, form)
            assert reply.status_code in statuses, (form, reply.status_code, reply.text[:500])
            assert time.monotonic() - begun < seconds
            error = error_of(reply)
        return error

    def needs(self, field: str, path: str = CHAT) -> None:
        """Skip while a request may not have this field with a value that asks for something.

        Only what the server refuses by the field's name counts: once it takes the field, the case runs.
        """
        asked = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
        reply = self.post(path, asked | {"max_tokens": 1} | ASKING[field])
        if reply.status_code == 400 and error_of(reply)["code"] in ("unsupported_value", "unknown_field"):
            pytest.skip(f"waits for {field}: {reply.json()['error']['message']}")

    def has_route(self, path: str) -> None:
        """Skip while the server has no such route."""
        if self.client.post(path, json={}).status_code == 404:
            pytest.skip(f"waits for {path}")

    def tokens_of(self, text: str) -> list[int]:
        """Of a text by itself, without BOS."""
        body = {"prompt": text, "add_special_tokens": False}
        ids = self.post("/tokenize", body).json()["tokens"]
        assert isinstance(ids, list)
        return ids

    def rendered(self, messages: list[dict[str, Any]], **more: Any) -> str:
        """A chat's prompt as text."""
        reply = self.post("/tokenize", {"messages": messages} | more)
        assert reply.status_code == 200, reply.text
        prompt = self.post("/detokenize", {"tokens": reply.json()["tokens"]}).json()["prompt"]
        assert isinstance(prompt, str)
        return prompt

    def metric(self, name: str) -> float:
        """The sum of all samples of a metric of ours, its name without the prefix."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            if line.split("{")[0].split(" ")[0] == f"servelite_{name}":
                total += float(line.rsplit(" ", 1)[1])
        return total

    def processes(self) -> list[int]:
        """Of an own server, all of its processes."""
        return [self.own.pid, *sorted(self.own.children())] if self.own else []

    def resident(self) -> int:
        """Bytes that an own server's processes have in memory."""
        sizes = [Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in self.processes()]
        return sum(int(size) for size in sizes) * os.sysconf("SC_PAGE_SIZE")

    def check_alive(self) -> None:
        """Healthy, it answers, and it is the same processes as when it started."""
        assert self.get("/health").status_code == 200
        answer = self.plain(COMPLETIONS, {"prompt": "Are you there?", "max_tokens": 4} | GREEDY)
        assert answer.counts["completion_tokens"] <= 4
        assert self.processes() == self._processes


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """The error in an answer of OpenAI's form; fails if it has another."""
    assert reply.headers["content-type"].split(";")[0] == "application/json", reply.headers
    body = strict_json(reply.content.decode("utf-8"))
    assert "detail" not in body, body
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"]
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], (str, int))
    return error  # type: ignore[no-any-return]


def together(calls: Iterable[Callable[[], _T]]) -> list[_T]:
    """All at once, a thread each; their results in order."""
    jobs = list(calls)
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: job(), jobs))


@contextmanager
def a_long_stream(target: Target) -> Iterator[None]:
    """Streams run beside what is tested, one after the other: no gap over 2 s, and each ends as it should."""
    gaps: list[float] = []
    bodies: list[bytes] = []
    over = threading.Event()
    body = {"model": target.model, "prompt": "On", "max_tokens": 100, "ignore_eos": True, "stream": True}

    def run() -> None:
        while not over.is_set():
            data, last = b"", time.monotonic()
            with target.client.stream("POST", COMPLETIONS, json=body) as reply:
                for piece in reply.iter_raw():
                    gaps.append(time.monotonic() - last)
                    data, last = data + piece, time.monotonic()
            bodies.append(data)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert max(gaps) < 2
    assert bodies and all(read_events(data).done for data in bodies)
