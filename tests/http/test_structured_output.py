"""Structured output over HTTP, by models that write at random: what finishes is what was asked for."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servelite import LLM
from tests.http.client import connected
from tests.http.server import Server, running_server

CHAT = "/v1/chat/completions"
FLAGS = ("--executor", "simulated", "--simulated-step-ms", "1", "--async-depth", "2", "--max-num-seqs", "32")
TEXT = '😀 👩\u200d👩\u200d👧 e\u0301 漢字 🇯🇵 नमस्ते "q" \\ /'
OBJECT = {
    "type": "object",
    "properties": {"s": {"type": "string", "enum": [TEXT]}},
    "required": ["s"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("structured")
    script = folder / "script.jsonl"
    script.write_text(json.dumps({"prompt": "Say it.", "text": "green, I think"}) + "\n")
    with running_server(folder, *FLAGS, "--simulated-script", str(script)) as running:
        yield running


def ask(content: str = "x", **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 300} | fields


def form(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema} | more}


def text(server: Server, body: dict[str, Any]) -> str:
    """The answer, which has come to its end."""
    status, answer = server.post(CHAT, body)
    assert status == 200, answer
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    content: str = choice["message"]["content"]
    return content


def test_no_grammar_ends_a_process_or_holds_it_up(server: Server) -> None:
    """A bound at the end of 64 bits, and long chains: each was a segmentation fault of both processes."""
    names = {
        **{str(i): {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(3000)},
        "3000": {"type": "integer"},
    }
    patterns = [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)]  # gigabytes for an automaton of all
    rules = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"'
    for fields, status in (
        ({"response_format": form({"const": -(2**63)})}, 400),
        ({"response_format": form({"$ref": "#/$defs/0", "$defs": names})}, 200),
        ({"response_format": form({"type": "string", "allOf": patterns})}, 400),
        ({"structured_outputs": {"grammar": rules}}, 200),
        ({"structured_outputs": {"regex": "x{100000}"}}, 400),
        ({"structured_outputs": {"regex": "[a-z]{100000}"}}, 200),
    ):
        found, answer = server.post(CHAT, ask(**fields) | {"max_tokens": 20})
        assert found == status, answer
        if status == 400:
            assert answer["error"]["param"].startswith(next(iter(fields)))


async def streamed(port: int, body: dict[str, Any]) -> list[str]:
    """The deltas of an answer, each of them whole characters."""
    async with connected(port) as connection:
        await connection.send(CHAT, body | {"stream": True})
        status, _ = await connection.head()
        assert status == 200
        events = b"".join([chunk async for chunk in connection.chunks()]).split(b"\n\n")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events if event.startswith(b"data: {")]
    return [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]


def test_a_text_that_is_forced_arrives_whole(server: Server) -> None:
    body = ask(response_format=form(OBJECT, strict=True), seed=3)
    plain = text(server, body)
    assert json.loads(plain) == {"s": TEXT}

    async def many() -> list[list[str]]:
        return await asyncio.gather(*(streamed(server.port, body) for _ in range(16)))

    for deltas in asyncio.run(many()):
        assert "".join(deltas) == plain and "\ufffd" not in plain


def test_each_kind(server: Server) -> None:
    for strict in (True, False):
        assert json.loads(text(server, ask(response_format=form({"type": "boolean"}, strict=strict)))) in (
            True,
            False,
        )
    assert text(server, ask(structured_outputs={"choice": ["red", "green"]})) in ("red", "green")
    assert re.fullmatch("[a-c]{3,5}", text(server, ask(structured_outputs={"regex": "[a-c]{3,5}"})))
    assert text(server, ask(structured_outputs={"grammar": 'root ::= "x" ("y" | "z")'})) in ("xy", "xz")
    assert text(server, ask(structured_outputs={"json": '{"const": "é"}'})) == '"é"'
    status, answer = server.post(CHAT, ask(response_format={"type": "json_object"}, max_tokens=40))
    assert status == 200 and answer["choices"][0]["message"]["content"].startswith("{")
    status, answer = server.post(
        "/v1/completions",
        {"model": "demo", "prompt": ["a", "b"], "n": 2, "response_format": form({"enum": [7, 8]})},
    )
    assert status == 200 and {choice["text"] for choice in answer["choices"]} <= {"7", "8"}
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 4


def test_a_script_gives_way_to_a_grammar(server: Server) -> None:
    assert text(server, ask("Say it.")) == "green, I think"
    assert text(server, ask("Say it.", structured_outputs={"choice": ["red", "green"]})) == "green"


def test_ignore_eos_and_min_tokens_end_with_the_grammar(server: Server) -> None:
    longest = {"structured_outputs": {"regex": "a{1,50}"}, "ignore_eos": True, "min_tokens": 3}
    assert text(server, ask(**longest)) == "a" * 50
    assert text(server, ask(structured_outputs={"choice": ["no"]}, min_tokens=100)) == "no"


def test_stop_strings_cut_and_lengths_end(server: Server) -> None:
    regex = {"structured_outputs": {"regex": "[ab]{20}-[ab]{20}"}}
    assert re.fullmatch("[ab]{20}", text(server, ask(stop="-", **regex)))
    status, answer = server.post(CHAT, ask(**regex | {"max_tokens": 2}))
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length"


BAD = [
    form({"type": "hiccup"}),
    form({"$ref": "#/$defs/none"}),
    form({"type": "string", "pattern": "([a-z"}),
    form({"type": "array", "uniqueItems": True}),
    form({"$ref": "#"}),
    form({"type": "string", "pattern": "(" * 20_000 + ")" * 20_000}),
    form({"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}),
]


def test_what_cannot_be_followed_is_a_400_while_others_go_on(server: Server) -> None:
    arrivals: list[float] = []

    def long_stream() -> None:
        connection = server.connect()
        connection.request("POST", CHAT, json.dumps(ask(stream=True, ignore_eos=True, max_tokens=2000)))
        answer = connection.getresponse()
        while answer.readline():
            arrivals.append(time.monotonic())
        connection.close()

    reader = threading.Thread(target=long_stream)
    reader.start()
    hurt = {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000, "maxItems": 1_000_000}
    while reader.is_alive():
        for bad in BAD:
            for stream in (False, True):
                status, answer = server.post(CHAT, ask(response_format=bad, stream=stream))
                assert status == 400 and answer["error"]["param"].startswith("response_format")
        for extension in ({"regex": "(unclosed"}, {"grammar": "root ::= "}):
            assert server.post(CHAT, ask(structured_outputs=extension))[0] == 400
        for wide in (form(hurt), form({"enum": [f"value {i}" for i in range(10_000)]})):
            assert server.post(CHAT, ask(response_format=wide, max_tokens=8))[0] == 200
    reader.join()
    assert max(b - a for a, b in itertools.pairwise(arrivals)) < 2
    assert len(arrivals) > 2000
    server.idle_metrics()


def test_the_offline_api(demo_model: Path) -> None:
    with LLM(str(demo_model), executor="simulated", simulated_step_ms=1) as llm:
        (answer,) = llm.generate("x", structured_outputs={"choice": ["red", "green"]})
        assert answer.text in ("red", "green") and answer.finish_reason == "stop"
        with pytest.raises(ValueError, match=r"structured_outputs\.json\.items.*'contains'"):
            llm.generate("x", structured_outputs={"json": {"items": {"contains": {}}}})


def _random_schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema that has short answers."""
    kinds = ["integer", "string", "enum", "boolean", "null", "number"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "anyOf", "allOf", "$ref"])
    if kind == "integer":
        low = rng.randint(-1000, 1000)
        bounds = {"minimum": low, "maximum": low + rng.randint(50, 5000)}
        return {"type": kind} | rng.choice([bounds, {"multipleOf": rng.randint(1, 30)} | bounds])
    if kind == "number":
        return {"type": kind, "minimum": rng.uniform(-5, 0), "exclusiveMaximum": rng.uniform(1, 9)}
    if kind == "string":
        return {"type": kind} | rng.choice(
            [{"pattern": "^[a-z]{2,5}$"}, {"minLength": 1, "maxLength": 4}, {"format": "date"}]
        )
    if kind == "enum":
        return rng.choice([{"enum": [1, "two", None, [3], {"a": "é"}]}, {"const": rng.randint(0, 9)}])
    if kind == "array":
        few = {"minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 3)}
        return {"type": kind, "items": _random_schema(rng, depth + 1)} | few
    if kind == "object":
        names = rng.sample(["a", "b/c", "naïve", 'd"', "e f"], rng.randint(1, 4))
        inner = {name: _random_schema(rng, depth + 1) for name in names}
        required = rng.sample(names, rng.randint(0, len(names)))
        return {"type": kind, "properties": inner, "required": required, "additionalProperties": False}
    if kind == "anyOf":
        return {"anyOf": [_random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "allOf":
        return {
            "allOf": [{"type": "integer", "minimum": rng.randint(0, 9)}, {"maximum": rng.randint(20, 99)}]
        }
    if kind == "$ref":
        return {"$ref": "#/$defs/d"}
    return {"type": kind}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_200_random_schemas(server: Server) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    rng = random.Random(6)
    bodies, schemas = [], []
    for number in range(200):
        schema = {"type": "object", "properties": {"x": _random_schema(rng)}, "required": ["x"]}
        schema |= {"additionalProperties": False, "$defs": {"d": {"type": "boolean"}}}
        jsonschema.Draft202012Validator.check_schema(schema)
        for seed in range(5):
            schemas.append(schema)
            bodies.append(ask(response_format=form(schema), seed=10 * number + seed, max_tokens=400))

    async def lane(lane: int) -> list[Any]:
        async with connected(server.port) as connection:
            return [await connection.post(CHAT, body) for body in bodies[lane::20]]

    async def everything() -> list[list[Any]]:
        return await asyncio.gather(*(lane(number) for number in range(20)))

    finished = 0
    for number, replies in enumerate(asyncio.run(everything())):
        for schema, reply in zip(schemas[number::20], replies, strict=True):
            assert reply.status == 200, reply.body
            choice = reply.json()["choices"][0]
            if choice["finish_reason"] == "stop":
                finished += 1
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    assert finished > 700
