"""`/v1/messages` and `/v1/messages/count_tokens`: bodies as chats, answers as messages and events."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from servelite.frontend.anthropic.request import NAMES, read_count, read_message_request
from servelite.frontend.app import make_app
from servelite.frontend.errors import APIError, bad_request, engine_dead
from servelite.frontend.protocol import PLAIN_RULES, RENDER_PATH, BodyRules, read_chat
from servelite.frontend.translated import renamed
from tests.frontend.asgi import Call
from tests.frontend.fake_engine import LENGTH, NONE, STOP, service_and_engine
from tests.frontend.named_events import call, collected, delta, read_events, streamed, types_of
from tests.frontend.test_responses import CHUNKS
from tests.frontend.translated_fields import DOCUMENT, RESULT, SCHEMA, TOOL, USE, text, user

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TEXT = {"type": "text", "text": "", "citations": []}


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
        (body(max_completion_tokens=5), 400, "invalid_request_error", "field max_completion_tokens"),
        (body(reasoning_effort="low"), 400, "invalid_request_error", "field reasoning_effort"),
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
            assert answer["request_id"] == call.headers["x-request-id"] == call.headers["request-id"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (body(max_tokens=600), r"input length and `max_tokens` exceed context limit: (\d+) \+ 600 > 512"),
        (body(messages=[user(text("a " * 600))]), r"prompt is too long: (\d+) tokens > 512 maximum"),
        (body(messages=[user(text("a" * 99999))]), r"prompt is too long\. .* messages has (\d+) bytes"),
    ],
)
async def test_a_full_context_is_told_in_the_words_that_clients_look_for(
    demo_model: Path, tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        app = make_app(service)
        message = (await Call(app, MESSAGES, given).done())["error"]["message"]
        found = re.match(words, message)
        assert found is not None, message
        if "bytes" not in message:
            asked = {name: value for name, value in given.items() if name != "max_tokens"}
            assert int(found[1]) == (await Call(app, COUNT, asked).done())["input_tokens"]


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
        error = events[-1]["error"]
        assert error["type"] == "overloaded_error" and "it was shot" in error["message"]
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


def test_what_the_system_says_amid_the_messages_joins_its_prompt() -> None:
    def said(content: Any, **more: Any) -> dict[str, Any]:
        return {"role": "system", "content": content} | more

    turns = [
        said("alpha"),
        user(text("hi")),
        said([text("beta")], clear_at="never"),
        said("gone", clear_at="next_user_message"),
        {"role": "assistant", "content": "yes"},
        user(text("go on")),
        said("gamma", clear_at="next_user_message"),
    ]
    billed = [text("x-anthropic-billing-header: cc_version=2; cch=1;"), text("first")]
    chat = read_message_request(body(messages=turns, system=billed), PLAIN_RULES).chat
    assert chat.messages == [
        {"role": "system", "content": "first\nalpha\nbeta\ngamma"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "go on"},
    ]


def test_what_can_be_told_as_text_is() -> None:
    blocks = [
        {"type": "document", "source": DOCUMENT | {"data": "one"}, "title": "T", "context": "C"},
        {"type": "document", "source": {"type": "content", "content": [text("two"), text("three")]}},
        {"type": "search_result", "source": "S", "title": "R", "content": [text("four")]},
    ]
    failed = RESULT | {"is_error": True, "content": [{"type": "tool_reference", "tool_name": "add"}]}
    chat = read_message_request(body(messages=[user(*blocks, failed)]), PLAIN_RULES).chat
    assert chat.messages == [
        {"role": "user", "content": "T\nC\none\ntwo\nthree\nR\nS\nfour"},
        {"role": "tool", "content": "Error: add", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize("old", [False, True])
def test_an_answer_that_was_begun_has_no_form(old: bool) -> None:
    begun = [user(text("hi")), {"role": "assistant", "content": "{"}]
    form = {"type": "json_schema", "schema": SCHEMA}
    given = {"output_format": form} if old else {"output_config": {"format": form}}
    assert read_message_request(body(**given), PLAIN_RULES).chat.options.grammar
    with pytest.raises(APIError) as caught:
        read_message_request(body(messages=begun, **given), PLAIN_RULES)
    assert caught.value.param == ("output_format" if old else "output_config.format")


def test_thinking_that_is_omitted_leaves_an_empty_block() -> None:
    asked = {"thinking": {"type": "adaptive", "display": "omitted"}}
    whole = collected(read_message_request(body(**asked), PLAIN_RULES), CHUNKS)
    assert whole["content"][:2] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        TEXT | {"text": "I add"},
    ]
    events = streamed(read_message_request(body(stream=True, **asked), PLAIN_RULES), CHUNKS)
    assert "thinking_delta" not in str(events) and events[1]["content_block"] == whole["content"][0]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("max_completion_tokens", "max_tokens"),
        (
            "tools[0].function.parameters.properties.parameters.function.not",
            "tools[0].input_schema.properties.parameters.function.not",
        ),
        ("tools[10].function.name", "tools[10].name"),
        ("tool_choice.function.name", "tool_choice.name"),
        (
            "response_format.json_schema.schema.properties.response_format.not",
            "output_config.format.schema.properties.response_format.not",
        ),
        ("response_format", "output_config.format"),
        ("response_formats", "response_formats"),
        ("messages", "messages"),
    ],
)
def test_only_our_own_names_are_renamed(ours: str, theirs: str) -> None:
    with pytest.raises(APIError) as caught, renamed(NAMES):
        raise bad_request(f"{ours} is odd: {ours}", ours)
    assert (caught.value.param, caught.value.message) == (theirs, f"{theirs} is odd: {ours}")


async def test_a_body_of_claude_codes(demo_model: Path, tmp_path: Path) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    asked = body(
        stream=True,
        system=[text("You are Claude Code."), text("long") | cached],
        messages=[
            user(text("<system-reminder>x</system-reminder>"), text("go") | cached),
            {"role": "system", "content": "Available agent types"},
        ],
        tools=[TOOL, TOOL | {"name": "mcp__" + "s" * 100, "defer_loading": True} | cached],
        metadata={"user_id": "user_1_account__session_2"},
        thinking={"type": "enabled", "budget_tokens": 31999},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        temperature=1,
    )
    headers = {
        "authorization": "Bearer k",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "anthropic-version": "2023-06-01",
        "x-stainless-lang": "js",
    }
    async with service_and_engine(demo_model, tmp_path, api_key=("k",)) as (service, engine):
        call_ = Call(make_app(service), MESSAGES, asked, headers)
        engine.step(((await engine.receive_add()).request, 0, [504, 2], STOP))
        await asyncio.wait_for(call_.task, 10)
        assert types_of(read_events(b"".join(call_.parts)))[-1] == "message_stop"
        del asked["max_tokens"], asked["stream"], asked["metadata"], asked["temperature"]
        counted = Call(make_app(service), COUNT, asked, headers)
        assert (await counted.done())["input_tokens"] > 0


def test_tools_of_the_servers_are_left_out_only_where_unknown_fields_are() -> None:
    asked = body(tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, TOOL])
    with pytest.raises(APIError, match="web_search_20250305") as caught:
        read_message_request(asked, PLAIN_RULES)
    assert (caught.value.param, caught.value.code) == ("tools[0].type", "unsupported_value")
    told: list[str] = []
    chat = read_message_request(asked, BodyRules(unknown=told.append)).chat
    assert [tool["function"]["name"] for tool in chat.tools.tools] == ["add"]
    assert told == ["tools[0].type=web_search_20250305"]


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
        "reasoning_effort": "max",
        "stop": ["x"],
        "stream": True,
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
    whole = collected(read_message_request(body(), PLAIN_RULES), CHUNKS)
    assert whole["content"] == [
        {"type": "thinking", "thinking": "let me see", "signature": ""},
        TEXT | {"text": "I add"},
        used("c", "add", {"a": 1}),
        used("d", "now", {}),
    ]
    assert (whole["stop_reason"], whole["usage"]) == ("tool_use", events[-2]["usage"])


@pytest.mark.parametrize(
    ("arguments", "ending", "given", "reason"),
    [
        ('{"a', "length", {"INVALID_JSON": '{"a'}, "max_tokens"),
        ("", "length", {"INVALID_JSON": ""}, "max_tokens"),
        ("", "stop", {"INVALID_JSON": ""}, "tool_use"),
        ('{"a": oops}', "stop", {"INVALID_JSON": '{"a": oops}'}, "tool_use"),
        ("[1]", "stop", {"INVALID_JSON": "[1]"}, "tool_use"),
        ("[" * 5000, "stop", {"INVALID_JSON": "[" * 5000}, "tool_use"),
    ],
)
def test_a_call_that_is_spoilt(arguments: str, ending: str, given: dict[str, Any], reason: str) -> None:
    chunks = [delta(**call(0, "", "c", "add")), delta(**call(0, arguments)), delta(ending)]
    whole = collected(read_message_request(body(), PLAIN_RULES), chunks)
    assert (whole["content"], whole["stop_reason"]) == ([used("c", "add", given)], reason)
    events = streamed(read_message_request(body(stream=True), PLAIN_RULES), chunks)
    assert events[-2]["delta"]["stop_reason"] == reason
    assert "".join(e["delta"]["partial_json"] for e in events if "partial_json" in str(e)) == (
        arguments or '{"INVALID_JSON": ""}'
    )


def test_numbers_in_arguments_stay_as_they_are_written() -> None:
    chunks = [delta(**call(0, '{"a": 1.10e2}', "c", "add")), delta("tool_calls")]
    translation = read_message_request(body(), PLAIN_RULES)
    assert collected(translation, chunks)["content"] == [used("c", "add", {"a": 110.0})]
    assert b'{"a": 1.10e2}' in translation.whole()


async def test_text_and_calls_keep_their_order(demo_model: Path, tmp_path: Path) -> None:
    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\nAnd wait.'
    async with service_and_engine(demo_model, tmp_path, tool_call_parser="hermes") as (service, engine):
        tokens = service.tokenizer.encode(text, add_special_tokens=False)
        for stream in (False, True):
            call_ = Call(make_app(service), MESSAGES, body(tools=[TOOL], max_tokens=99, stream=stream))
            engine.step(((await engine.receive_add()).request, 0, [*tokens, 2], STOP))
            await asyncio.wait_for(call_.task, 10)
            raw = b"".join(call_.parts)
            if stream:
                starts = [e["content_block"] for e in read_events(raw) if e["type"] == "content_block_start"]
                assert [block["type"] for block in starts] == ["text", "tool_use", "text"]
            else:
                first, use, last = json.loads(raw)["content"]
                assert (first["text"], use["input"], last["text"]) == ("I add.", {"a": 1}, "\n\nAnd wait.")


async def test_a_whole_answer_that_fails_after_its_first_token(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call_ = Call(make_app(service), MESSAGES, body())
        engine.step(((await engine.receive_add()).request, 0, [504], NONE))
        await asyncio.sleep(0.05)
        service.engine.fail_all(engine_dead("it was shot"))
        answer = await call_.done()
        assert (call_.status, answer["error"]["type"]) == (503, "overloaded_error")


def test_a_stream_without_a_word() -> None:
    events = streamed(read_message_request(body(stream=True), PLAIN_RULES), [delta("stop")])
    assert types_of(events) == ["message_start", "message_delta", "message_stop"]
