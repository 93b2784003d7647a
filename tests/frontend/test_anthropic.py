"""`/v1/messages` and `/v1/messages/count_tokens`: bodies as chats, answers as messages and events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servelite.frontend.anthropic.request import read_count, read_message_request
from servelite.frontend.app import make_app
from servelite.frontend.errors import engine_dead
from servelite.frontend.protocol import PLAIN_RULES, RENDER_PATH, read_chat
from servelite.frontend.translated import Chunk
from tests.frontend.asgi import Call
from tests.frontend.fake_engine import LENGTH, NONE, STOP, service_and_engine
from tests.frontend.named_events import delta, read_events, streamed, types_of
from tests.frontend.test_responses import CHUNKS, WHOLE
from tests.frontend.translated_fields import RESULT, SCHEMA, TOOL, USE, text, user

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TEXT = {"type": "text", "text": "", "citations": None}


def used(call_id: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """A use of a tool in an answer."""
    use = {"type": "tool_use", "id": call_id, "name": name, "input": given}
    return use | {"caller": {"type": "direct"}}


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Input that was not cached, input that was, output."""
    return usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}


async def test_a_whole_message(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        app = make_app(service)
        call = Call(app, MESSAGES, body(system="be brief", temperature=0, top_k=3))
        add = await engine.receive_add()
        assert (add.sampling.max_tokens, add.sampling.temperature, add.sampling.top_k) == (9, 0, 3)
        engine.step((add.request, 0, [504, 505, 2], STOP))
        answer = await call.done()
        assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "demo")
        assert answer["content"] == [TEXT | {"text": "Theib"}]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
        prompt = len(add.prompt) // 4
        assert counts(answer["usage"]) == (prompt, 0, 3)
        asked = body(system="be brief")
        del asked["max_tokens"]
        assert await Call(app, COUNT, asked).done() == {"input_tokens": prompt}


async def test_a_stream_in_order(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), MESSAGES, body(stream=True))
        add = await engine.receive_add()
        for i in range(3):
            engine.step((add.request, i, [504], LENGTH if i == 2 else NONE))
            await asyncio.sleep(0.02)
        await asyncio.wait_for(call.task, 10)
        events = read_events(b"".join(call.parts))
        assert types_of(events) == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        start = events[0]["message"]
        assert (start["content"], start["stop_reason"]) == ([], None)
        assert start["usage"]["input_tokens"] == len(add.prompt) // 4
        assert events[1]["content_block"] == TEXT and events[1]["index"] == 0
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert deltas == [{"type": "text_delta", "text": "The"}] * 3
        told = events[-2]["delta"]
        assert (told["stop_reason"], told["stop_sequence"]) == ("max_tokens", None)
        assert events[-2]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named(demo_model: Path, tmp_path: Path, stream: bool) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), MESSAGES, body(stream=stream, stop_sequences=["x", "ib"]))
        engine.step(((await engine.receive_add()).request, 0, [504, 505], NONE))
        await asyncio.wait_for(call.task, 10)
        raw = b"".join(call.parts)
        told = read_events(raw)[-2]["delta"] if stream else json.loads(raw)
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "ib")


async def test_a_silence_is_filled_with_pings(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path, sse_keep_alive=0.02) as (service, engine):
        call = Call(make_app(service), MESSAGES, body(stream=True))
        number = (await engine.receive_add()).request
        await asyncio.sleep(0.1)
        engine.step((number, 0, [2], STOP))
        await asyncio.wait_for(call.task, 10)
        types = types_of(read_events(b"".join(call.parts)))
        assert types == ["message_start", "ping", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("given", "status", "kind", "word"),
    [
        (b"{", 400, "invalid_request_error", "JSON"),
        (body(max_tokens=None), 400, "invalid_request_error", "max_tokens"),
        (body(max_tokens=600), 400, "invalid_request_error", "512"),
        (body(odd=1), 400, "invalid_request_error", "odd"),
        (body(messages=[user({"type": "image", "source": {}})]), 400, "invalid_request_error", "image"),
        (body(tools=[TOOL | {"input_schema": []}]), 400, "invalid_request_error", "tools[0].input_schema"),
        (body(model="other"), 404, "not_found_error", "other"),
        (b"x" * ((8 << 20) + 1), 413, "request_too_large", str(8 << 20)),
    ],
)
async def test_errors_have_anthropics_body(
    demo_model: Path, tmp_path: Path, given: Any, status: int, kind: str, word: str
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        app = make_app(service)
        for path in (MESSAGES, COUNT):
            if path == COUNT and isinstance(given, dict) and given.get("max_tokens") != 9:
                continue
            if path == COUNT and isinstance(given, dict):
                given = {name: value for name, value in given.items() if name != "max_tokens"}
            call = Call(app, path, given)
            answer = await call.done()
            assert (call.status, answer["type"], answer["error"]["type"]) == (status, "error", kind)
            assert word in answer["error"]["message"]
            assert answer["request_id"] == call.headers["x-request-id"]


async def test_a_thread_is_refused_by_the_code_that_sdks_know(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        error = (await Call(make_app(service), MESSAGES, body(thread={"type": "create"})).done())["error"]
        assert error["details"] == {"error_code": "thread_unsupported_request"}


async def test_refusals_before_the_route_have_it_too(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path, api_key=("k",)) as (service, engine):
        app = make_app(service)
        for path, headers, given, status, kind in (
            (MESSAGES, {}, body(), 401, "authentication_error"),
            (MESSAGES, {"x-api-key": "wrong"}, body(), 401, "authentication_error"),
            (MESSAGES, {"x-api-key": "k"}, None, 405, "invalid_request_error"),
            (MESSAGES + "/batches", {"x-api-key": "k"}, body(), 404, "not_found_error"),
        ):
            call = Call(app, path, given, headers)
            answer = await call.done()
            assert (call.status, answer["error"]["type"]) == (status, kind)
        call = Call(app, MESSAGES, body(), {"x-api-key": "k", "anthropic-version": "2023-06-01"})
        engine.step(((await engine.receive_add()).request, 0, [2], STOP))
        assert (await call.done())["content"] == []
        service.engine.lose()
        service.lifecycle.lose_engine("it was shot")
        call = Call(app, MESSAGES, body(), {"x-api-key": "k"})
        assert (await call.done())["error"]["type"] == "overloaded_error" and call.status == 503
        call = Call(app, "/v1/messages-other", body(), {"x-api-key": "k"})
        assert (await call.done())["error"]["type"] == "invalid_request_error" and call.status == 404


async def test_an_engine_that_dies_in_a_stream(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), MESSAGES, body(stream=True))
        engine.step(((await engine.receive_add()).request, 0, [504], NONE))
        await call.arrived.wait()
        service.engine.fail_all(engine_dead("it was shot"))
        await asyncio.wait_for(call.task, 10)
        events = read_events(b"".join(call.parts))
        assert events[-1]["type"] == "error" and "it was shot" in events[-1]["error"]["message"]
        assert "message_stop" not in types_of(events)


def test_blocks_become_messages() -> None:
    turns = [
        user(text("alpha"), text("beta") | {"cache_control": {"type": "ephemeral"}}),
        {"role": "user", "content": "gamma"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("I look")],
        },
        {
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": "x"}, USE, USE | {"id": "d"}],
        },
        user(RESULT, RESULT | {"tool_use_id": "d", "content": [text("3"), text("4")]}, text("go on")),
        {"role": "assistant", "content": [USE]},
        user(RESULT | {"content": None}),
    ]
    chat = read_message_request(body(messages=turns, system=[text("first")]), PLAIN_RULES).chat

    def made(call_id: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

    assert chat.messages == [
        {"role": "system", "content": "first"},
        {"role": "user", "content": "alpha\nbeta\ngamma"},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "hm",
            "tool_calls": [made("c"), made("d")],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "tool", "content": "3\n4", "tool_call_id": "d"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "", "tool_calls": [made("c")]},
        {"role": "tool", "content": "", "tool_call_id": "c"},
    ]
    assert chat.template.add_generation_prompt


def test_fields_become_a_chats() -> None:
    asked = body(
        tools=[TOOL | {"strict": True}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "max"},
        stop_sequences=["x"],
        stream=True,
    )
    function = {"name": "add", "description": "adds", "strict": True, "parameters": SCHEMA}
    same = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "xhigh",
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert read_message_request(asked, PLAIN_RULES).chat == read_chat(same)
    off = read_message_request(body(thinking={"type": "disabled"}), PLAIN_RULES).chat
    assert off.template.kwargs == {"enable_thinking": False}


async def test_an_answer_that_was_begun_is_continued(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The best is ("}]
        asked = {"model": "demo", "messages": begun}
        assert read_count(asked, PLAIN_RULES).template.continue_final_message
        app = make_app(service)
        dry = await Call(app, RENDER_PATH, asked | {"continue_final_message": True}).done()
        assert dry["prompt"].endswith("assistant\nThe best is (")
        assert (await Call(app, COUNT, asked).done())["input_tokens"] == dry["count"]


def test_thinking_and_uses_of_tools_are_blocks() -> None:
    events = streamed(read_message_request(body(tools=[TOOL], stream=True), PLAIN_RULES), CHUNKS)
    one_block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert types_of(events) == ["message_start", *one_block * 4, "message_delta", "message_stop"]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        TEXT,
        used("c", "add", {}),
        used("d", "now", {}),
    ]
    texts = ["", "", "", ""]
    for event in events:
        if event["type"] == "content_block_delta":
            ((name, value),) = [pair for pair in event["delta"].items() if pair[0] != "type"]
            assert (
                event["delta"]["type"]
                == {
                    "thinking": "thinking_delta",
                    "text": "text_delta",
                    "partial_json": "input_json_delta",
                }[name]
            )
            texts[event["index"]] += value
    assert texts == ["let me see", "I add", '{"a": 1}', "{}"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert counts(events[-2]["usage"]) == (3, 2, 7)
    whole = json.loads(read_message_request(body(), PLAIN_RULES).whole(msgspec.convert(WHOLE, Chunk)))
    assert whole["content"] == [
        {"type": "thinking", "thinking": "let me see", "signature": ""},
        TEXT | {"text": "I add"},
        used("c", "add", {"a": 1}),
        used("d", "now", {}),
    ]
    assert (whole["stop_reason"], whole["usage"]) == ("tool_use", events[-2]["usage"])


def test_a_call_that_is_cut_off_has_no_input() -> None:
    cut = {"id": "c", "function": {"name": "add", "arguments": '{"a'}}
    choice = {"message": {"tool_calls": [cut]}, "finish_reason": "length"}
    answer = msgspec.convert({"choices": [choice]}, Chunk)
    whole = json.loads(read_message_request(body(), PLAIN_RULES).whole(answer))
    assert whole["content"] == [used("c", "add", {})]
    assert whole["stop_reason"] == "max_tokens"


def test_a_stream_without_a_word() -> None:
    events = streamed(read_message_request(body(stream=True), PLAIN_RULES), [delta("stop")])
    assert types_of(events) == ["message_start", "message_delta", "message_stop"]
