"""The routes over ASGI with a fake engine: answers, errors, streams, clients that vanish."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from servelite.frontend.app import make_app
from servelite.frontend.errors import engine_dead
from servelite.ipc.messages import RequestError
from tests.frontend.asgi import Call
from tests.frontend.fake_engine import ERROR, LENGTH, NONE, service_and_engine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "hi"}], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": [504], **fields}


async def test_plain_answers(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        app = make_app(service)
        call = Call(app, CHAT, chat())
        add = await engine.receive_add()
        assert add.sampling.max_tokens == 512 - len(add.prompt) // 4  # to the context's end
        engine.step((add.request, 0, [504, 505], LENGTH))
        body = await call.done()
        assert call.status == 200
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["role"] == "assistant"
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 2
        call = Call(app, COMPLETIONS, completion())
        add = await engine.receive_add()
        assert add.sampling.max_tokens == 16
        engine.step((add.request, 0, [504], LENGTH))
        assert (await call.done())["choices"][0]["text"] == "The"


async def test_a_stream_in_order(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        body = chat(stream=True, stream_options={"include_usage": True})
        call = Call(make_app(service), CHAT, body, {"X-Request-Id": "mine"})
        number = (await engine.receive_add()).request
        assert call.status == 0  # nothing is said before the engine has spoken
        for i in range(3):
            engine.step((number, i, [504], LENGTH if i == 2 else NONE))
            await asyncio.sleep(0.03)  # one token, one event
        events = await call.done()
        assert call.headers["cache-control"] == "no-cache"
        assert call.headers["x-accel-buffering"] == "no"
        assert call.headers["x-request-id"] == "mine"
        assert events[-1] == "[DONE]"
        assert len({event["id"] for event in events[:-1]}) == 1
        assert [event["choices"][0]["delta"] for event in events[:-2]] == [
            {"role": "assistant", "content": ""},
            {"content": "The"},
            {"content": "The"},
            {"content": "The"},
            {},
        ]
        assert [event["choices"][0]["finish_reason"] for event in events[:-2]] == [None] * 4 + ["length"]
        assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_of_one_stop_token(demo_model: Path, tmp_path: Path, path: str) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        body = chat(stream=True) if path == CHAT else completion(stream=True)
        call = Call(make_app(service), path, body)
        engine.step(((await engine.receive_add()).request, 0, [2], LENGTH))
        events = await call.done()
        assert events[-1] == "[DONE]" and len(events) == (3 if path == CHAT else 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_by_the_engine_is_no_stream(demo_model: Path, tmp_path: Path, stream: bool) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion(stream=stream))
        number = (await engine.receive_add()).request
        engine.step((number, 0, [], ERROR), errors={number: RequestError(400, "never_fits", "no room")})
        body = await call.done()
        assert call.status == 400
        assert body["error"] == {
            "message": "no room",
            "type": "invalid_request_error",
            "param": None,
            "code": "never_fits",
        }


async def test_an_engine_that_dies_ends_open_streams_with_an_event(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        app = make_app(service)
        stream = Call(app, COMPLETIONS, completion(stream=True))
        streaming = (await engine.receive_add()).request
        plain = Call(app, COMPLETIONS, completion())
        await engine.receive_add()
        engine.step((streaming, 0, [504], NONE))
        await asyncio.wait_for(stream.arrived.wait(), 5)
        service.lifecycle.lose_engine("kill -9")
        service.engine.fail_all(engine_dead("kill -9"))
        events = await stream.done()
        assert events[-1]["error"]["code"] == "engine_dead" and "kill -9" in events[-1]["error"]["message"]
        assert (await plain.done())["error"]["code"] == "engine_dead"
        assert plain.status == 503
        late = Call(app, COMPLETIONS, completion())
        assert (await late.done())["error"]["code"] == "engine_dead"
        ready = Call(app, "/health/ready", None)
        await ready.done()
        assert ready.status == 503


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_first_token", [True, False])
async def test_a_vanished_client_is_aborted(
    demo_model: Path, tmp_path: Path, stream: bool, after_first_token: bool
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion(stream=stream))
        number = (await engine.receive_add()).request
        if after_first_token:
            engine.step((number, 0, [504], NONE))
            await asyncio.sleep(0.05)
        call.vanish()
        assert await asyncio.wait_for(engine.receive_abort(), 1) == [number]
        await asyncio.wait_for(call.task, 5)
        assert service.lifecycle.answers == 0 and service._admission.accepted == 0
        engine.step((number, 1, [504], NONE))  # already on its way: dropped
        assert await engine.nothing_comes()


async def test_a_client_that_vanishes_while_its_prompt_is_prepared(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion())
        call.vanish()
        await asyncio.wait_for(call.task, 5)
        assert call.status == 0 and service._admission.accepted == 0
        with pytest.raises(TimeoutError):  # the engine hears nothing of it
            await asyncio.wait_for(engine.receive_add(), 0.2)


async def test_a_long_wait_opens_the_stream_with_comments(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path, sse_keep_alive=0.02) as (service, engine):
        call = Call(make_app(service), CHAT, chat(stream=True))
        number = (await engine.receive_add()).request
        await asyncio.sleep(0.1)
        assert call.status == 200
        assert call.parts[0].startswith(b"data: ") and call.parts[1:3] == [b": waiting\n\n"] * 2
        engine.step((number, 0, [504], LENGTH))
        events = await call.done()
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert events[1]["choices"][0]["delta"]["content"] == "The"
        assert sum("role" in event["choices"][0]["delta"] for event in events[:-1]) == 1


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"model":"demo","prompt":"\\ud800"}', 400, "invalid_json"),
        (b"x" * ((8 << 20) + 1), 413, "body_too_large"),
        ({"model": "other", "prompt": "x"}, 404, "model_not_found"),
        ({"model": "demo"}, 400, "missing_field"),
        ({"model": "demo", "prompt": "x", "odd": 1}, 400, "unknown_field"),
        ({"model": "demo", "prompt": ""}, 400, None),
        ({"model": "demo", "prompt": [49152]}, 400, None),
        ({"model": "demo", "prompt": [-1]}, 400, None),
        ({"model": "demo", "prompt": [1] * 500, "max_tokens": 13}, 400, "context_length_exceeded"),
        ({"model": "demo", "prompt": "word " * 600}, 400, "context_length_exceeded"),
    ],
)
async def test_errors_have_openais_body(
    demo_model: Path, tmp_path: Path, body: Any, status: int, code: str | None
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, body)
        error = (await call.done())["error"]
        assert (call.status, error["code"]) == (status, code)
        assert set(error) == {"message", "type", "param", "code"}
        assert call.headers["x-request-id"]
        assert await engine.nothing_comes(0.01)


async def test_the_three_numbers_are_told(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        call = Call(make_app(service), COMPLETIONS, completion(prompt=[1] * 500, max_tokens=20))
        message = (await call.done())["error"]["message"]
        assert "512" in message and "500" in message and "20" in message
        call = Call(make_app(service), CHAT, chat(messages=[{"role": "user", "content": "word " * 600}]))
        assert (await call.done())["error"]["code"] == "context_length_exceeded"


async def test_before_the_engine_is_ready(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path, greet=False) as (service, _):
        app = make_app(service)
        call = Call(app, COMPLETIONS, completion())
        assert (await call.done())["error"]["code"] == "engine_not_ready"
        for path, status in (
            ("/health/live", 200),
            ("/health/ready", 503),
            ("/health", 503),
            ("/v1/models", 200),
        ):
            probe = Call(app, path, None)
            await probe.done()
            assert probe.status == status, path


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), (CHAT, 405), ("/v1/models/none/such", 404)])
async def test_the_frameworks_errors_too(demo_model: Path, tmp_path: Path, path: str, status: int) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        call = Call(make_app(service), path, None)
        assert set((await call.done())["error"]) == {"message", "type", "param", "code"}
        assert call.status == status


async def test_a_request_id_that_is_no_word_is_replaced(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        for given in ("a b", "x" * 129, "é"):
            call = Call(make_app(service), "/version", None, {"x-request-id": given})
            await call.done()
            assert call.headers["x-request-id"] not in (given, "")


async def test_models_and_names(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path, served_model_name=("a", "org/b")) as (service, _):
        app = make_app(service)
        listing = await Call(app, "/v1/models", None).done()
        assert [(m["id"], m["max_model_len"]) for m in listing["data"]] == [("a", 512), ("org/b", 512)]
        assert (await Call(app, "/v1/models/org/b", None).done())["id"] == "org/b"
        call = Call(app, COMPLETIONS, completion())
        await call.done()
        assert call.status == 404  # the model's own name is not among those it goes by
