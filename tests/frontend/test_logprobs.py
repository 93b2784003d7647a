"""Logprobs in all their forms: chat, legacy, prompt, echoed, streamed; true bytes of each token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from servelite.frontend.app import make_app
from servelite.frontend.logprobs import LEAST, LogprobTable
from servelite.ipc.messages import TokenLogprobs, pack, unpack
from tests.frontend.asgi import Call
from tests.frontend.fake_engine import LENGTH, NONE, service_and_engine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def part(first: int, rows: list[tuple[float, dict[int, float]]]) -> TokenLogprobs:
    """Of consecutive tokens: (own logprob, likeliest tokens) each."""
    k = len(rows[0][1])
    return TokenLogprobs(
        first,
        k,
        np.array([own for own, _ in rows], "<f4").tobytes(),
        pack([token for _, tops in rows for token in tops]),
        np.array([value for _, tops in rows for value in tops.values()], "<f4").tobytes(),
    )


def test_a_table_takes_each_token_once() -> None:
    table = LogprobTable(0)
    table.take(part(0, [(-1.0, {5: -0.5}), (-2.0, {6: -0.25})]))
    table.take(part(1, [(-2.0, {6: -0.25}), (-float("inf"), {7: -0.75})]))
    assert [table.at(index) for index in range(2)] == [(-1.0, [5], [-0.5]), (-2.0, [6], [-0.25])]
    assert table.at(2) == (LEAST, [7], [-0.75])
    assert table.at(3) is None and LogprobTable(1).at(0) is None
    with pytest.raises(ValueError, match="of 1 tokens before token 4"):
        table.take(part(4, [(-1.0, {5: -1.0})]))
    assert table.at(3) is None  # nothing of what follows a gap is taken
    bare = LogprobTable(0)
    bare.take(part(0, [(-1.0, {}), (-2.0, {})]))
    assert bare.at(1) == (-2.0, [], []) and bare.at(2) is None


def emoji(tokenizer: Any) -> list[int]:
    """An emoji of several tokens."""
    ids: list[int] = tokenizer.encode("🦜", add_special_tokens=False)
    assert len(ids) > 1
    return ids


async def test_a_chats_logprobs(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        app, body = make_app(service), {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        tokens = [504, *emoji(service.tokenizer)]
        rows = [(-float(i + 1), {token: -0.5, 505: -0.75}) for i, token in enumerate(tokens)]
        contents = []
        for stream in (False, True):
            call = Call(app, CHAT, body | {"logprobs": True, "top_logprobs": 2, "stream": stream})
            add = await engine.receive_add()
            assert (add.sampling.logprobs, add.sampling.prompt_logprobs) == (2, -1)
            for i, (token, row) in enumerate(zip(tokens, rows, strict=True)):
                last = LENGTH if i == len(tokens) - 1 else NONE
                engine.step((add.request, i, [token], last), logprobs={add.request: part(i, [row])})
                await asyncio.sleep(0.02)
            answer = await call.done()
            if not stream:
                ChatCompletion.model_validate(answer, strict=True)
                contents.append(answer["choices"][0]["logprobs"]["content"])
                continue
            assert answer.pop() == "[DONE]"
            for event in answer:
                ChatCompletionChunk.model_validate(event, strict=True)
            told = [event["choices"][0]["logprobs"] for event in answer]
            contents.append([entry for one in told if one for entry in one["content"]])
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in answer)
            assert text == "The🦜"
        assert contents[0] == contents[1]
        assert [entry["logprob"] for entry in contents[0]] == [-float(i + 1) for i in range(len(tokens))]
        assert bytes(byte for entry in contents[0] for byte in entry["bytes"]).decode() == "The🦜"
        assert contents[0][0]["top_logprobs"] == [
            {"token": "The", "logprob": -0.5, "bytes": [84, 104, 101]},
            {
                "token": service.tokenizer.decode([505]),
                "logprob": -0.75,
                "bytes": list(service.tokenizer.token_bytes(505)),
            },
        ]


async def test_a_chat_without_logprobs_has_none(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
        for fields, logprobs in ((body, 0), (body | {"logprobs": False}, -1)):
            call = Call(make_app(service), CHAT, fields)
            add = await engine.receive_add()
            assert add.sampling.logprobs == logprobs
            tables = {add.request: part(0, [(-1.0, {})])} if logprobs == 0 else {}
            engine.step((add.request, 0, [504], LENGTH), logprobs=tables)
            told = (await call.done())["choices"][0]["logprobs"]
            expected = {"token": "The", "logprob": -1.0, "bytes": [84, 104, 101], "top_logprobs": []}
            assert told == ({"content": [expected], "refusal": None} if logprobs == 0 else None)


async def test_an_echoed_prompt_and_its_logprobs(demo_model: Path, tmp_path: Path) -> None:
    """The legacy form: offsets in characters, tokens that are no characters by their bytes."""
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        app = make_app(service)
        answer_ids = [504, *emoji(service.tokenizer)]
        found = []
        for stream in (False, True):
            body = {"model": "demo", "prompt": "Say it: hé", "echo": True, "logprobs": 1, "stream": stream}
            call = Call(app, COMPLETIONS, body)
            add = await engine.receive_add()
            assert (add.sampling.logprobs, add.sampling.prompt_logprobs) == (1, 1)
            prompt = unpack(add.prompt).tolist()
            prompt_part = part(1, [(-9.0, {token: -0.5}) for token in prompt[1:]])
            own = part(0, [(-2.0, {505: -0.25}) for _ in answer_ids])
            engine.step(
                (add.request, 0, answer_ids, LENGTH),
                logprobs={add.request: own},
                prompt_logprobs={add.request: prompt_part},
            )
            answer = await call.done()
            if stream:
                choices = [event["choices"][0] for event in answer[:-1]]
                text = "".join(choice["text"] for choice in choices)
                parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
                merged = {name: [item for one in parts for item in one[name]] for name in parts[0]}
                found.append((text, merged))
            else:
                found.append((answer["choices"][0]["text"], answer["choices"][0]["logprobs"]))
        assert found[0] == found[1]
        text, logprobs = found[0]
        assert text == "Say it: héThe🦜"
        assert logprobs["token_logprobs"] == [None, *[-9.0] * (len(prompt) - 1), *[-2.0] * len(answer_ids)]
        assert logprobs["top_logprobs"][0] is None
        at = len(prompt)
        assert logprobs["text_offset"][at : at + 2] == [len("Say it: hé"), len("Say it: héThe")]
        assert logprobs["top_logprobs"][at] == {service.tokenizer.decode([505]): -0.25, "The": -2.0}
        assert logprobs["tokens"][at] == "The" and logprobs["tokens"][at + 1].startswith("bytes:\\xf0")


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_scored_without_an_answer(demo_model: Path, tmp_path: Path, stream: bool) -> None:
    """Of what the engine gives for the last token of each prompt nothing is told, a stop token or not."""
    body = {"model": "demo", "prompt": [[505, 506], [507, 508, 509]], "n": 2, "max_tokens": 0, "echo": True}
    body |= {"logprobs": 1, "return_token_ids": True, "stop": "The", "stop_token_ids": [504]}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, body | options)
        prompts = []
        for _ in range(4):
            add = await engine.receive_add()
            assert add.sampling.max_tokens == 1 and not add.sampling.stop_token_ids
            prompts.append(unpack(add.prompt).tolist())
            engine.step(
                (add.request, 0, [504], LENGTH),
                logprobs={add.request: part(0, [(-2.0, {505: -0.25})])},
                prompt_logprobs={add.request: part(1, [(-9.0, {700: -0.5}) for _ in prompts[-1][1:]])},
            )
        answer = await call.done()
        assert call.status == 200
        parts = [event for event in answer if event != "[DONE]"] if stream else [answer]
        assert parts[-1]["usage"]["completion_tokens"] == 0 and parts[-1]["usage"]["prompt_tokens"] == 5
        for index, ids in enumerate(prompts):
            told = [one for event in parts for one in event["choices"] if one["index"] == index]
            assert "".join(one["text"] for one in told) == service.tokenizer.decode(ids)
            assert [one["finish_reason"] for one in told if one["finish_reason"]] == ["length"]
            assert not any(one["stop_reason"] for one in told if "stop_reason" in one)
            assert not any(one.get("token_ids") for one in told)
            tables = [one["logprobs"] for one in told if one["logprobs"]]
            scores = [score for table in tables for score in table["token_logprobs"]]
            assert scores == [None, *[-9.0] * (len(ids) - 1)]


async def test_nothing_is_written_where_nothing_is_asked_for(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, {"model": "demo", "prompt": "hi", "max_tokens": 0})
        engine.step(((await engine.receive_add()).request, 0, [504], LENGTH))
        (choice,) = (await call.done())["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")


async def test_echo_alone_and_of_token_ids(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        app = make_app(service)
        for stream in (False, True):
            body = {"model": "demo", "prompt": [505, 506], "echo": True, "stream": stream}
            call = Call(app, COMPLETIONS, body)
            add = await engine.receive_add()
            assert (add.sampling.logprobs, add.sampling.prompt_logprobs) == (-1, -1)
            engine.step((add.request, 0, [504], LENGTH))
            answer = await call.done()
            events = [answer] if not stream else answer[:-1]
            text = "".join(event["choices"][0]["text"] for event in events)
            assert text == service.tokenizer.decode([505, 506, 504])
            assert all(event["choices"][0]["logprobs"] is None for event in events)


@pytest.mark.parametrize("chat", [True, False])
async def test_prompt_logprobs_and_token_ids(demo_model: Path, tmp_path: Path, chat: bool) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        asked: dict[str, Any] = {"prompt": [504, 505, 506]}
        if chat:
            asked = {"messages": [{"role": "user", "content": "hi"}]}
        body = {"model": "demo", "prompt_logprobs": 1, "return_token_ids": True, **asked}
        call = Call(make_app(service), CHAT if chat else COMPLETIONS, body)
        add = await engine.receive_add()
        prompt = unpack(add.prompt).tolist()
        rows = part(1, [(-2.0, {900: -0.5}) for _ in prompt[1:]])
        engine.step((add.request, 0, [504], LENGTH), prompt_logprobs={add.request: rows})
        answer = await call.done()
        choice = answer["choices"][0]
        holder = answer if chat else choice
        assert choice["token_ids"] == [504] and holder["prompt_token_ids"] == prompt
        first, second, *_ = holder["prompt_logprobs"]
        assert first is None
        assert second[str(prompt[1])]["logprob"] == -2.0 and second[str(prompt[1])]["rank"] is None
        assert second["900"] == {
            "logprob": -0.5,
            "rank": 1,
            "decoded_token": service.tokenizer.decode([900]),
        }


@pytest.mark.parametrize("chat", [True, False])
async def test_token_ids_of_a_stream(demo_model: Path, tmp_path: Path, chat: bool) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        asked: dict[str, Any] = {"prompt": [504, 505, 506]}
        if chat:
            asked = {"messages": [{"role": "user", "content": "hi"}]}
        body = {"model": "demo", "return_token_ids": True, "stream": True, **asked}
        call = Call(make_app(service), CHAT if chat else COMPLETIONS, body)
        add = await engine.receive_add()
        tokens = [504, *emoji(service.tokenizer), 2]
        for i, token in enumerate(tokens):
            engine.step((add.request, i, [token], LENGTH if i == len(tokens) - 1 else NONE))
            await asyncio.sleep(0.02)
        events = (await call.done())[:-1]
        first = events[0] if chat else events[0]["choices"][0]
        assert first["prompt_token_ids"] == unpack(add.prompt).tolist()
        told = [event["choices"][0].get("token_ids", []) for event in events]
        assert [token for one in told for token in one] == tokens


async def test_lost_logprobs_fail_their_request_only(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        app = make_app(service)
        body = {"model": "demo", "prompt": [504], "logprobs": 0}
        lost, other = Call(app, COMPLETIONS, body), Call(app, COMPLETIONS, body)
        one, two = [(await engine.receive_add()).request for _ in range(2)]
        engine.step(
            (one, 0, [504], LENGTH),
            (two, 0, [504], LENGTH),
            logprobs={one: part(1, [(-1.0, {})]), two: part(0, [(-1.0, {})])},
        )
        bodies = [await lost.done(), await other.done()]
        assert sorted((lost.status, other.status)) == [200, 500]
        assert any("error" in body and body["error"]["code"] == "engine_error" for body in bodies)


async def test_the_logprobs_of_a_tool_call(demo_model: Path, tmp_path: Path) -> None:
    """Each token is told once, those of markers too, however much text the parser holds back."""
    text = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "Münster 🦜"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": tools,
        "logprobs": True,
    }
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        tokens = service.tokenizer.encode(text, add_special_tokens=False)
        contents = []
        for stream in (False, True):
            call = Call(make_app(service), CHAT, body | {"stream": stream})
            add = await engine.receive_add()
            for i, token in enumerate(tokens):
                row = part(i, [(-float(i + 1), {})])
                last = LENGTH if i == len(tokens) - 1 else NONE
                engine.step((add.request, i, [token], last), logprobs={add.request: row})
                await asyncio.sleep(0.002)
            answer = await call.done()
            told = [event["choices"][0] for event in (answer[:-1] if stream else [answer])]
            contents.append([e for one in told if one["logprobs"] for e in one["logprobs"]["content"]])
            messages = [one.get("delta", one.get("message")) for one in told]
            calls = [made["function"] for message in messages for made in message.get("tool_calls", ())]
            assert "".join(made["arguments"] for made in calls) == '{"a": "Münster 🦜"}'
            assert "".join(message.get("content") or "" for message in messages) == "Well."
        assert contents[0] == contents[1]
        assert [entry["logprob"] for entry in contents[0]] == [-float(i + 1) for i in range(len(tokens))]
        assert bytes(byte for entry in contents[0] for byte in entry["bytes"]).decode() == text
