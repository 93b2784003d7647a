"""Several answers to one request: `n`, lists of prompts, whole and streamed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from servelite.frontend.app import make_app
from servelite.frontend.errors import engine_dead
from servelite.ipc.messages import RequestError, Timings, unpack
from servelite.tokenizer.block_hashes import block_hashes
from tests.frontend.asgi import Call
from tests.frontend.fake_engine import ERROR, LENGTH, NONE, service_and_engine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": [504] * 40, **fields}


async def test_n_answers_share_one_prompt(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), CHAT, {"model": "demo", "messages": MESSAGES, "n": 3})
        adds = [await engine.receive_add() for _ in range(3)]
        assert [add.choice for add in adds] == [0, 1, 2]
        assert len({add.seed for add in adds}) == 1 and len({add.prompt for add in adds}) == 1
        assert [add.prefix_of for add in adds] == [-1, adds[0].request, adds[0].request]
        assert adds[0].block_hashes == block_hashes(adds[0].prompt, 16) != b""
        for add, token in zip(reversed(adds), (504, 505, 506), strict=True):  # in no order of theirs
            engine.step(
                (add.request, 0, [token], LENGTH), timings={add.request: Timings(0, 0, 0, cached_tokens=16)}
            )
        body = await call.done()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert texts == [service.tokenizer.decode([token]) for token in (506, 505, 504)]
        prompt_tokens = len(unpack(adds[0].prompt))
        assert body["usage"] == {
            "prompt_tokens": prompt_tokens,  # once
            "completion_tokens": 3,
            "total_tokens": prompt_tokens + 3,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        assert (
            f'servelite_prompt_tokens_total{{model_name="demo"}} {prompt_tokens}.0'.encode()
            in service.metrics.expose()
        )
        assert service._admission.accepted == 0


async def test_choices_come_prompt_by_prompt(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion(prompt=["one", [504, 505]], n=2))
        adds = [await engine.receive_add() for _ in range(4)]
        assert [add.choice for add in adds] == [0, 1, 0, 1]
        assert [add.prefix_of for add in adds] == [-1, adds[0].request, -1, adds[2].request]
        assert unpack(adds[3].prompt).tolist() == [504, 505]
        for add in adds:
            engine.step((add.request, 0, [600 + add.request], LENGTH))
        body = await call.done()
        texts = [service.tokenizer.decode([600 + add.request]) for add in adds]
        assert [choice["text"] for choice in body["choices"]] == texts
        assert body["usage"]["prompt_tokens"] == len(unpack(adds[0].prompt)) + 2


@pytest.mark.parametrize("chat", [True, False])
async def test_a_stream_of_several_choices(demo_model: Path, tmp_path: Path, chat: bool) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        body = completion(n=2) if not chat else {"model": "demo", "messages": MESSAGES, "n": 2}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        call = Call(make_app(service), CHAT if chat else COMPLETIONS, body | options)
        one, two = [(await engine.receive_add()).request for _ in range(2)]
        engine.step((two, 0, [504], NONE))
        await asyncio.wait_for(call.arrived.wait(), 5)
        engine.step((one, 0, [505], NONE), (two, 1, [506], LENGTH))
        engine.step((one, 1, [507], LENGTH))
        events = await call.done()
        assert events.pop() == "[DONE]"
        last = events.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
        choices = [event["choices"][0] for event in events]
        if chat:
            assert [c["delta"] for c in choices[:2]] == [{"role": "assistant", "content": ""}] * 2
            assert [c["index"] for c in choices[:2]] == [0, 1]
        for index, tokens in ((0, [505, 507]), (1, [504, 506])):
            mine = [c for c in choices if c["index"] == index]
            text = "".join((c["delta"].get("content", "") if chat else c["text"]) for c in mine)
            assert text == service.tokenizer.decode(tokens)
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
            assert mine[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
async def test_one_refused_choice_ends_the_request(demo_model: Path, tmp_path: Path, stream: bool) -> None:
    """With nothing sent: a status of its own, at once; and the other choice is aborted."""
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion(n=2, stream=stream))
        one, two = [(await engine.receive_add()).request for _ in range(2)]
        engine.step((two, 0, [], ERROR), errors={two: RequestError(503, "queue_full", "full")})
        body = await call.done()
        assert (call.status, body["error"]["code"]) == (503, "queue_full")
        assert int(call.headers["retry-after"]) >= 1
        assert await engine.receive_abort() == [one]
        assert service._admission.accepted == 0


async def test_a_deadline_is_the_first_answers(demo_model: Path, tmp_path: Path) -> None:
    """Once that runs, the request has begun, and nothing of it may expire."""
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion(prompt=["a", "b"], n=2, deadline_ms=60_000))
        deadlines = [(await engine.receive_add()).deadline_ms for _ in range(4)]
        assert 0 < deadlines[0] <= 60_000 and deadlines[1:] == [-1] * 3
        call.vanish()
        await asyncio.wait_for(call.task, 5)


async def test_prompts_that_can_never_wait_together_are_refused(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path, max_waiting_tokens=100) as (service, engine):
        app = make_app(service)
        call = Call(app, COMPLETIONS, completion(prompt=[[504] * 40] * 3))
        error = (await call.done())["error"]
        assert (call.status, error["code"], error["param"]) == (400, "too_many_prompt_tokens", "prompt")
        assert "120 tokens" in error["message"] and "100" in error["message"]
        assert await engine.nothing_comes() and service._admission.accepted == 0
        fitting = ({"prompt": [[504] * 40] * 2}, {"prompt": [504] * 200}, {"prompt": [504] * 90, "n": 4})
        calls = [Call(app, COMPLETIONS, completion(**fits)) for fits in fitting]
        for _ in range(2 + 1 + 4):
            await engine.receive_add()
        for call in calls:
            call.vanish()
            await asyncio.wait_for(call.task, 5)


async def test_all_choices_of_a_dead_engine_end_in_one_event(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion(n=2, stream=True))
        one, _ = [(await engine.receive_add()).request for _ in range(2)]
        engine.step((one, 0, [504], NONE))
        await asyncio.wait_for(call.arrived.wait(), 5)
        service.engine.fail_all(engine_dead("kill -9"))
        events = await call.done()
        assert [event for event in events if "error" in event] == events[-1:]
        assert service.lifecycle.answers == 0 and service._admission.accepted == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_vanished_client_aborts_all_choices(demo_model: Path, tmp_path: Path, stream: bool) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion(n=3, stream=stream))
        numbers = [(await engine.receive_add()).request for _ in range(3)]
        call.vanish()
        assert sorted([(await engine.receive_abort())[0] for _ in range(3)]) == numbers
        await asyncio.wait_for(call.task, 5)
        assert service._admission.accepted == 0


async def test_places_are_counted_by_choice(demo_model: Path, tmp_path: Path) -> None:
    bounds = {"max_num_seqs": 2, "max_waiting_requests": 2}
    async with service_and_engine(demo_model, tmp_path, **bounds) as (service, engine):
        app = make_app(service)
        call = Call(app, COMPLETIONS, completion(n=5))
        assert (await call.done())["error"]["code"] == "too_many_answers" and call.status == 400
        three = Call(app, COMPLETIONS, completion(n=3))
        for _ in range(3):
            await engine.receive_add()
        call = Call(app, COMPLETIONS, completion(n=2))
        assert (await call.done())["error"]["code"] == "queue_full" and call.status == 503
        one = Call(app, COMPLETIONS, completion())
        await engine.receive_add()
        for call in (three, one):
            call.vanish()
            await asyncio.wait_for(call.task, 5)


async def test_nothing_is_submitted_if_one_prompt_cannot_be(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion(prompt=["fine", [49152]]))
        error = (await call.done())["error"]
        assert call.status == 400 and error["param"] == "prompt[1]"
        call = Call(make_app(service), COMPLETIONS, completion(prompt=["fine", [1] * 512]))
        error = (await call.done())["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt[1]")
        call = Call(make_app(service), COMPLETIONS, completion(prompt=["fine", ""]))
        assert (await call.done())["error"]["param"] == "prompt[1]"
        assert await engine.nothing_comes() and service._admission.accepted == 0
