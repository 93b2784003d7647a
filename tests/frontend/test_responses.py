"""`/v1/responses`: bodies as chats, answers as objects and events."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servelite.frontend.app import make_app
from servelite.frontend.chunks import Usage
from servelite.frontend.errors import APIError, engine_dead
from servelite.frontend.protocol import PLAIN_RULES, read_chat
from servelite.frontend.responses.fields import LOGPROBS
from servelite.frontend.responses.request import read_response
from tests.frontend.asgi import Call
from tests.frontend.fake_engine import LENGTH, NONE, STOP, service_and_engine
from tests.frontend.named_events import call, collected, delta, read_events, streamed, types_of
from tests.frontend.translated_fields import CALL, FLAT, OUTPUT, text

RESPONSES = "/v1/responses"
TEXT_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
USAGE = Usage(5, 7, 2)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": "hi", **fields}


async def test_a_whole_answer(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        asked = body(instructions="be brief", max_output_tokens=9, temperature=0, metadata={"a": "b"})
        call_ = Call(make_app(service), RESPONSES, asked)
        add = await engine.receive_add()
        assert (add.sampling.max_tokens, add.sampling.temperature) == (9, 0)
        engine.step((add.request, 0, [504, 505, 2], STOP))
        answer = await call_.done()
        assert call_.status == 200
        assert answer["object"] == "response" and answer["id"].startswith("resp_")
        assert (answer["status"], answer["incomplete_details"], answer["error"]) == ("completed", None, None)
        assert answer["completed_at"] >= answer["created_at"]
        (message,) = answer["output"]
        assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
        (part,) = message["content"]
        assert part == {"type": "output_text", "text": "Theib", "annotations": [], "logprobs": []}
        prompt = len(add.prompt) // 4
        assert answer["usage"]["input_tokens"] == prompt and answer["usage"]["output_tokens"] == 3
        assert answer["usage"]["total_tokens"] == prompt + 3
        assert (answer["instructions"], answer["max_output_tokens"]) == ("be brief", 9)
        assert answer["metadata"] == {"a": "b"} and answer["store"] is False


async def test_a_stream_in_order(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call_ = Call(make_app(service), RESPONSES, body(stream=True))
        number = (await engine.receive_add()).request
        for i in range(3):
            engine.step((number, i, [504], LENGTH if i == 2 else NONE))
            await asyncio.sleep(0.02)
        await asyncio.wait_for(call_.task, 10)
        assert call_.headers["content-type"].startswith("text/event-stream")
        events = read_events(b"".join(call_.parts))
        assert types_of(events) == [
            "response.created",
            "response.in_progress",
            *TEXT_EVENTS,
            "response.incomplete",
        ]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        assert deltas == ["The"] * 3  # one token, one event
        first, last = events[0]["response"], events[-1]["response"]
        assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
        assert last["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["output"][0]["content"][0]["text"] == "TheTheThe"
        assert last["output"][0] == events[-2]["item"]
        assert last["usage"]["output_tokens"] == 3
        assert set(first) == set(last) and first["id"] == last["id"]


async def test_an_answer_without_text_has_a_message(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        for stream in (False, True):
            call_ = Call(make_app(service), RESPONSES, body(stream=stream))
            engine.step(((await engine.receive_add()).request, 0, [2], STOP))
            await asyncio.wait_for(call_.task, 10)
            raw = b"".join(call_.parts)
            answer = read_events(raw)[-1]["response"] if stream else json.loads(raw)
            assert answer["status"] == "completed"
            assert answer["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("given", "param", "status"),
    [
        (body(background=True), "background", 400),
        (body(previous_response_id="resp_x"), "previous_response_id", 400),
        (body(conversation="c"), "conversation", 400),
        (
            body(input=[{"role": "user", "content": [{"type": "input_nothing"}]}]),
            "input[0].content[0].type",
            400,
        ),
        (body(input="word " * 600), "input", 400),
        (body(max_output_tokens=512), "max_output_tokens", 400),
        (body(max_tokens=5), "max_tokens", 400),
        (body(max_completion_tokens=5), "max_completion_tokens", 400),
        ({"model": "demo", "messages": []}, "messages", 400),
        (body(top_logprobs=2), "top_logprobs", 400),
        (body(tools=[FLAT | {"name": "a b"}]), "tools[0].name", 400),
        (body(model="other"), "model", 404),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_any_stream(
    demo_model: Path, tmp_path: Path, given: dict[str, Any], param: str, status: int, stream: bool
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call_ = Call(make_app(service), RESPONSES, given | {"stream": stream})
        error = (await call_.done())["error"]
        assert (call_.status, error["param"]) == (status, param)
        assert param in error["message"] or "context length" in error["message"]
        assert await engine.nothing_comes(0.01)


@pytest.mark.parametrize("begun", [False, True])
async def test_an_engine_that_dies(demo_model: Path, tmp_path: Path, begun: bool) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call_ = Call(make_app(service), RESPONSES, body(stream=True))
        number = (await engine.receive_add()).request
        if begun:
            engine.step((number, 0, [504], NONE))
            await call_.arrived.wait()
        service.engine.fail_all(engine_dead("it was shot"))
        await asyncio.wait_for(call_.task, 10)
        if not begun:
            assert (call_.status, call_.read()["error"]["code"]) == (503, "engine_dead")
            return
        events = read_events(b"".join(call_.parts))
        assert types_of(events)[-2:] == ["response.output_text.delta", "response.failed"]
        failed = events[-1]["response"]
        assert failed["status"] == "failed" and "it was shot" in failed["error"]["message"]
        assert failed["output"][0]["status"] == "incomplete"
        assert failed["output"][0]["content"][0]["text"] == "The"


async def test_a_client_that_leaves(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call_ = Call(make_app(service), RESPONSES, body())
        number = (await engine.receive_add()).request
        call_.vanish()
        assert await engine.receive_abort() == [number]
        await asyncio.wait_for(call_.task, 10)


def test_items_become_messages() -> None:
    turns = [
        {"role": "developer", "content": "rules"},
        {
            "type": "message",
            "role": "user",
            "content": [text("alpha", "input_text"), text("beta", "input_text")],
        },
        {"type": "reasoning", "summary": [], "content": [text("hm", "reasoning_text")]},
        {"role": "assistant", "phase": "commentary", "content": [text("I look", "output_text")]},
        CALL,
        CALL | {"call_id": "d"},
        OUTPUT,
        OUTPUT | {"call_id": "d", "output": [text("3", "input_text")]},
        {"type": "reasoning", "summary": [text("short", "summary_text")]},
        CALL | {"call_id": "e"},
    ]
    chat = read_response(body(input=turns, instructions="first"), PLAIN_RULES).chat

    def made(call_id: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

    assert chat.messages == [
        {"role": "system", "content": "first"},
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "alpha\nbeta"},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "hm",
            "tool_calls": [made("c"), made("d")],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "tool", "content": "3", "tool_call_id": "d"},
        {"role": "assistant", "content": "", "reasoning_content": "short", "tool_calls": [made("e")]},
    ]


def test_every_way_to_say_hi_is_the_same() -> None:
    said = [
        "hi",
        [{"role": "user", "content": "hi"}],
        [{"type": "message", "role": "user", "content": [text("hi", "input_text")]}],
    ]
    chats = [read_response(body(input=one), PLAIN_RULES).chat for one in said]
    assert chats[0] == chats[1] == chats[2]
    plain = read_chat({"model": "demo", "messages": [{"role": "user", "content": "hi"}]})
    assert chats[0] == plain
    assert read_response(body(stream_options={"include_obfuscation": None}), PLAIN_RULES).chat == plain


def test_fields_become_a_chats() -> None:
    asked = body(
        tools=[FLAT],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        include=[LOGPROBS],
        top_logprobs=3,
        top_k=5,
        cache_salt="s",
        stream=True,
    )
    tool = {"type": "function", "function": {name: FLAT[name] for name in ("name", "parameters", "strict")}}
    same = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 3,
        "top_k": 5,
        "cache_salt": "s",
        "stream": True,
    }
    chat = read_chat(same)
    here = replace(chat.tools, places=("tools[0].parameters",))
    assert read_response(asked, PLAIN_RULES).chat == replace(chat, tools=here)


CHUNKS = [
    delta(role="assistant", content=""),
    delta(reasoning_content="let me "),
    delta(reasoning_content="see"),
    delta(content="I "),
    delta(content="add"),
    delta(**call(0, "", "c", "add")),
    delta(**call(0, '{"a"')),
    delta(**call(0, ": 1}")),
    delta(**call(1, "", "d", "now")),
    delta(**call(1, "{}")),
    delta("tool_calls"),
    {"choices": [], "usage": USAGE},
]


def test_reasoning_and_calls_are_items() -> None:
    translation = read_response(body(tools=[FLAT], stream=True), PLAIN_RULES)
    events = streamed(translation, CHUNKS)
    one_call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert types_of(events) == [
        "response.created",
        "response.in_progress",
        *[name.replace("output_text", "reasoning_text") for name in TEXT_EVENTS],
        *TEXT_EVENTS,
        *one_call,
        *one_call,
        "response.completed",
    ]
    response = events[-1]["response"]
    reasoning, message, *calls = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me see"}]
    assert message["content"][0]["text"] == "I add"
    assert [(c["call_id"], c["name"], c["arguments"]) for c in calls] == [
        ("c", "add", '{"a": 1}'),
        ("d", "now", "{}"),
    ]
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 2}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    added = [(e["output_index"], e["item"]["id"]) for e in events if e["type"].endswith("item.added")]
    assert added == [(i, item["id"]) for i, item in enumerate(done)]
    for event in events:  # each part of an item says whose it is
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]


def test_a_whole_answer_is_what_its_stream_adds_up_to() -> None:
    streams = streamed(read_response(body(stream=True), PLAIN_RULES), CHUNKS)[-1]["response"]
    whole = collected(read_response(body(), PLAIN_RULES), CHUNKS)

    def plain(response: dict[str, Any]) -> Any:
        items = [{k: v for k, v in item.items() if k != "id"} for item in response["output"]]
        return items, response["status"], response["usage"]

    assert plain(whole) == plain(streams)


def test_a_call_that_is_cut_off() -> None:
    chunks = [delta(**call(0, "", "c", "add")), delta(**call(0, '{"a')), delta("length")]
    events = streamed(read_response(body(tools=[FLAT], stream=True), PLAIN_RULES), chunks)
    assert events[-1]["type"] == "response.incomplete"
    (item,) = events[-1]["response"]["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"a')


def test_log_probabilities() -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    chunk = delta(content="a")
    chunk["choices"][0]["logprobs"] = json.dumps({"content": [entry], "refusal": None}).encode()
    events = streamed(
        read_response(body(include=[LOGPROBS], stream=True), PLAIN_RULES), [chunk, delta("stop")]
    )
    told = {event["type"]: event["logprobs"] for event in events if "logprobs" in event}
    assert told == {"response.output_text.delta": [entry], "response.output_text.done": [entry]}
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [entry]


def test_a_field_of_a_chat_is_no_field_here() -> None:
    for name in ("messages", "n", "logprobs", "max_completion_tokens", "response_format"):
        with pytest.raises(APIError) as caught:
            read_response(body(**{name: 1}), PLAIN_RULES)
        assert (caught.value.code, caught.value.param) == ("unknown_field", name)
