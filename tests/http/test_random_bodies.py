"""Random bodies, most of them wrong somewhere: never a 5xx, the engine lives, all its blocks come back."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from servelite.frontend.endpoints import ENDPOINTS
from servelite.frontend.fields import Field
from tests.frontend.field_cases import HI, cases
from tests.http.client import connected
from tests.http.server import running_server

CLIENTS = 16
FLAGS = (
    *("--executor", "simulated", "--simulated-step-ms", "0", "--max-model-len", "256"),
    *(
        "--max-waiting-requests",
        "4096",
        "--scheduling-policy",
        "priority",
        "--num-gpu-blocks-override",
        "400",
    ),
)
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "demo", "messages": HI, "max_tokens": 4},
    "/v1/completions": {"model": "demo", "prompt": "hi", "max_tokens": 4},
    "/v1/embeddings": {"model": "demo", "input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/chat/completions/render": {"model": "demo", "messages": HI},
    "/v1/responses": {"model": "demo", "input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"model": "demo", "messages": HI, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "demo", "messages": HI},
}
ENDS: dict[str, tuple[bytes, ...]] = {
    "/v1/chat/completions": (b"data: [DONE]",),
    "/v1/completions": (b"data: [DONE]",),
    "/v1/responses": (b"event: response.completed\n", b"event: response.incomplete\n"),
    "/v1/messages": (b"event: message_stop\n",),
}
ERROR = {"message", "type", "param", "code"}
LARGE = 20_000  # characters of a value that is used only now and then: they are slow, not interesting
# A deadline may pass before a request runs: a 503 that is right. n=128 is tried on its own, below.
SKIPPED = {"deadline_ms", "n"}


class Bodies:
    """An endless row of (path, body) that depends on the seed alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._values: dict[tuple[str, str], list[Any]] = {}
        for path, fields in ENDPOINTS.items():
            for field in fields:
                self._values[path, field.name] = self._values_of(field)

    def _values_of(self, field: Field) -> list[Any]:
        values = [case.value for case in cases(field)]
        return [value for value in values if len(json.dumps(value)) < LARGE]

    def next(self) -> tuple[str, bytes]:
        rng = self._random
        path = rng.choice(tuple(ENDPOINTS))
        body: Any = dict(PLAIN[path])
        names = [field.name for field in ENDPOINTS[path] if field.name not in SKIPPED]
        for name in rng.sample(names, rng.choice((0, 1, 1, 2, 3, 6)) % (len(names) + 1)):
            values = self._values[path, name]
            body[name] = rng.choice(values) if values and rng.random() < 0.8 else self._junk(3)
        if "n" in {field.name for field in ENDPOINTS[path]} and rng.random() < 0.1:
            body["n"] = rng.choice((1, 2, 5))
        if rng.random() < 0.05:
            body[self._text()] = self._junk(3)
        if rng.random() < 0.02:
            body = self._junk(4)
        data = json.dumps(body).encode()
        if rng.random() < 0.05:
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.randbytes(rng.randrange(4)) + data[at + rng.randrange(4) :]
        return path, data

    def _text(self) -> str:
        return "".join(self._random.choices("ab\x00\ud800é🦜<|im_end|> \n", k=self._random.randrange(8)))

    def _junk(self, depth: int) -> Any:
        rng = self._random
        kind = rng.randrange(8 if depth else 6)
        if kind == 6:
            return [self._junk(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 7:
            return {self._text(): self._junk(depth - 1) for _ in range(rng.randrange(4))}
        return (
            None,
            rng.random() < 0.5,
            rng.randint(-(1 << 70), 1 << 70),
            rng.gauss(0, 10),
            self._text(),
            0,
        )[kind]


def test_the_row_is_fixed() -> None:
    one, two = Bodies(3), Bodies(3)
    assert [one.next() for _ in range(200)] == [two.next() for _ in range(200)]


async def send_all(port: int, bodies: Bodies, count: int) -> Counter[int]:
    statuses: Counter[int] = Counter()
    left = iter(range(count))

    async def client() -> None:
        async with connected(port) as connection:
            for _ in left:
                path, body = bodies.next()
                reply = await asyncio.wait_for(connection.post(path, body), 60)
                assert reply.status < 500, (path, body, reply)
                statuses[reply.status] += 1
                if reply.status >= 400:
                    names = {"message", "type"} if "/messages" in path else ERROR
                    assert set(reply.json()["error"]) - {"details"} == names
                elif b"text/event-stream" in reply.headers.get("content-type", "").encode():
                    assert reply.body.split(b"\n\n")[-2].startswith(ENDS[path]), (path, body, reply)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return statuses


@pytest.mark.parametrize(
    "count", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(240)])]
)
async def test_random_bodies(tmp_path: Path, demo_model: Path, count: int) -> None:
    with running_server(tmp_path, *FLAGS) as server:
        children = server.children()
        statuses = await send_all(server.port, Bodies(20261129), count)
        assert sum(statuses.values()) == count
        assert min(statuses[200], statuses[400]) > count / 10, statuses
        # Every answer allowed at once, by n and by prompts.
        async with connected(server.port) as connection:
            body = PLAIN["/v1/completions"] | {"n": 128, "prompt": ["a", "b", "c"], "ignore_eos": True}
            reply = await connection.post("/v1/completions", body)
            assert reply.status == 200 and reply.json()["usage"]["completion_tokens"] == 4 * 128 * 3
        server.idle_metrics()
        assert server.children() == children and server.get("/health/ready")[0] == 200
        assert "Traceback" not in server.errors(), server.errors()
