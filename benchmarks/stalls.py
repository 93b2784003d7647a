"""How long one request keeps the others waiting: the longest gap in another client's stream.

    python -m benchmarks.stalls [--cases chat completions grammar] [--model demo] [--rounds 5]

A server on the simulated executor makes a token every 20 ms. One client streams; another sends a request
that is much work for the front end: a prompt of 100,000 tokens in each of the APIs, a body that is refused
after it has been read, a grammar that takes long to compile. Of each round the longest gap is taken, and of
the rounds the least, which is the server's doing and not the machine's; then what it is above that of as
many rounds in which nothing else was sent.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

STEP_MS = 20
PROMPT_TOKENS = 100_000
FLAGS = (
    *("--executor", "simulated", "--simulated-step-ms", str(STEP_MS), "--max-model-len", "200000"),
    *("--num-gpu-blocks-override", "20000", "--max-num-batched-tokens", "8192"),
    *("--max-body-bytes", str(32 << 20)),
)
STREAM_TOKENS = 100_000  # more than any round takes
MESSAGES_PATH = "/v1/messages"


def words(count: int, seed: int) -> str:
    """A text of about as many tokens, no two alike: nothing of it is in a tokenizer's cache."""
    draw = random.Random(seed)
    return "".join(f" {draw.choice(WORDS)}{draw.choice(WORDS)}" for _ in range(count // 2))


WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week"),
    *("company", "system", "program", "question", "work", "number", "night", "point", "home", "water"),
)


def _messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _schema(seed: int) -> dict[str, Any]:
    """One that takes long to compile, within the limits: no two seeds' are alike."""
    names = [f"name{seed}x{i}" for i in range(1000)]
    properties = {name: {"type": "string", "pattern": "^[a-z]{1,40}-[0-9]{1,40}$"} for name in names}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _grammar(seed: int) -> dict[str, Any]:
    schema = {"name": "a", "strict": True, "schema": _schema(seed)}
    return _messages("x") | {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tools(seed: int) -> dict[str, Any]:
    function = {"name": "f", "parameters": _schema(seed)}
    return _messages("x") | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def _ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(count)]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CASES: Mapping[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "completions": (COMPLETIONS, lambda seed: {"prompt": words(PROMPT_TOKENS, seed)}),
    "token IDs": (COMPLETIONS, lambda seed: {"prompt": _ids(PROMPT_TOKENS, seed)}),
    "chat": (CHAT, lambda seed: _messages(words(PROMPT_TOKENS, seed))),
    "responses": ("/v1/responses", lambda seed: {"input": words(PROMPT_TOKENS, seed)}),
    "messages": (MESSAGES_PATH, lambda seed: _messages(words(PROMPT_TOKENS, seed))),
    "count": (f"{MESSAGES_PATH}/count_tokens", lambda seed: _messages(words(PROMPT_TOKENS, seed))),
    "tokenize": ("/tokenize", lambda seed: {"prompt": words(PROMPT_TOKENS, seed)}),
    "render": (f"{CHAT}/render", lambda seed: _messages(words(PROMPT_TOKENS, seed))),
    "grammar": (CHAT, _grammar),
    "tools": (CHAT, _tools),
    "20 MB of text": (COMPLETIONS, lambda seed: {"prompt": "a b " * (5 << 20)}),
    "20 MB of chat": (CHAT, lambda seed: _messages('"é\n' * (2 << 20))),
    "20 MB of IDs": (COMPLETIONS, lambda seed: {"prompt": [seed] * (10 << 20)}),
    "20 MB of messages": (CHAT, lambda seed: {"messages": [{"role": "user", "content": "x"}] * 600_000}),
    "20 MB of objects": (CHAT, lambda seed: {"messages": [{}] * (5 << 20)}),
}
LENGTH_FIELD = {"/v1/responses": "max_output_tokens", COMPLETIONS: "max_tokens", CHAT: "max_tokens"}
LENGTH_FIELD[MESSAGES_PATH] = "max_tokens"


class Bystander:
    """A streaming client, read by a thread of its own; it notes when it was given something."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"model": "x", "prompt": "x", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        self._connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while self._answer.readline():
                self._times.append(time.perf_counter())
        except (OSError, ValueError, http.client.HTTPException):
            pass  # closed

    def longest_gap(self, begin: float, end: float) -> float:
        """Seconds, of those gaps that lie in part between the two times."""
        while not self._times or self._times[-1] < end:
            time.sleep(STEP_MS / 1000)
        times = self._times
        return max(b - a for a, b in pairwise(times) if b >= begin and a <= end)

    def close(self) -> None:
        """End the stream."""
        assert self._connection.sock is not None
        self._connection.sock.shutdown(2)
        self._thread.join()
        self._connection.close()


def ask(port: int, path: str, body: bytes) -> int:
    """Send a request and read its answer; returns the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status in (200, 400), text[:300]
        return answer.status
    finally:
        connection.close()


def measure(port: int, case: str, rounds: int) -> tuple[float, float, int]:
    """(longest gap beside nothing, longest gap beside the case's request, status), seconds."""
    path, make = CASES[case]
    quiet, beside = [], []
    bystander = Bystander(port)
    try:
        for seed in range(rounds):
            fields = {"model": "x", **make(seed)}
            if path in LENGTH_FIELD:
                fields[LENGTH_FIELD[path]] = 1
            body = json.dumps(fields).encode()
            del fields
            began = time.perf_counter()
            status = ask(port, path, body)
            ended = time.perf_counter()
            beside.append(bystander.longest_gap(began, ended))
            time.sleep(min(ended - began, 2.0))
            quiet.append(bystander.longest_gap(ended + STEP_MS / 1000, time.perf_counter()))
    finally:
        bystander.close()
    return min(quiet), min(beside), status


@contextmanager
def server(model: str) -> Iterator[int]:
    """One that is ready: its port."""
    command = [sys.executable, "-m", "servelite", "serve", model, "--port", "0", "--served-model-name", "x"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *FLAGS], stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            found = re.search(r"https?://\S+:(\d+)", process.stdout.readline())
            if found is None:
                log.seek(0)
                raise SystemExit(log.read())
            yield int(found[1])
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


def main() -> None:
    """Print each case's figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", default="demo", help="whose tokenizer and chat template")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with server(options.model) as port:
        for case in options.cases:
            quiet, beside, status = measure(port, case, options.rounds)
            print(
                f"{case:18} longest gap {beside * 1000:6.1f} ms, beside nothing {quiet * 1000:5.1f} ms:"
                f" {(beside - quiet) * 1000:+6.1f} ms (status {status})",
                flush=True,
            )


if __name__ == "__main__":
    main()
