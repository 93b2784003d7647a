"""What a request tells the engine besides its prompt, and what a server's settings do to it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from servelite.frontend.app import make_app
from servelite.frontend.protocol import RENDER_PATH
from servelite.ipc.messages import unpack
from servelite.tokenizer.block_hashes import block_hashes
from tests.frontend.asgi import Call
from tests.frontend.fake_engine import LENGTH, NONE, STOP, service_and_engine
from tests.tokenizer.small_folder import save, sentencepiece

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": [504] * 40, **fields}


async def finish(engine: Any, call: Call) -> Any:
    """The engine answers one token; returns the Add."""
    add = await engine.receive_add()
    engine.step((add.request, 0, [504], LENGTH))
    await call.done()
    assert call.status == 200, call.read()
    return add


async def test_every_sampling_field_reaches_the_engine(demo_model: Path, tmp_path: Path) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100, "5": 3.5},
        "allowed_token_ids": [5, 6, 7],
        "stop_token_ids": [9],
        "min_tokens": 2,
        "seed": 3,
        "max_tokens": 11,
    }
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        add = await finish(engine, Call(make_app(service), COMPLETIONS, completion(**fields)))
        sampling = add.sampling
        for name in ("temperature", "top_p", "top_k", "min_p", "min_tokens", "max_tokens"):
            assert getattr(sampling, name) == fields[name], name
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            assert getattr(sampling, name) == fields[name], name
        assert sampling.logit_bias == ((5, 3.5), (7, -100.0))
        assert sampling.allowed_token_ids == (5, 6, 7)
        assert sampling.stop_token_ids == (*service.tokenizer.eos_token_ids, 9)
        assert (add.seed, sampling.logprobs, sampling.prompt_logprobs) == (3, -1, -1)


async def test_bad_words_are_tokens_with_and_without_a_space(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion(bad_words=["Paris", "no way"]))
        add = await finish(engine, call)
        words = {service.tokenizer.decode(ids) for ids in add.sampling.bad_words}
        assert words == {"Paris", " Paris", "no way", " no way"}


async def test_salt_priority_and_deadline(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path, scheduling_policy="priority") as (service, engine):
        body = completion(cache_salt="mine", priority=-3, deadline_ms=60_000)
        add = await finish(engine, Call(make_app(service), COMPLETIONS, body))
        assert (add.cache_salt, add.priority) == ("mine", -3)
        assert 50_000 < add.deadline_ms <= 60_000
        assert add.block_hashes == block_hashes(add.prompt, 16, "mine") != block_hashes(add.prompt, 16)


async def test_a_priority_without_effect_is_refused(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        call = Call(make_app(service), COMPLETIONS, completion(priority=1))
        error = (await call.done())["error"]
        assert (call.status, error["param"]) == (400, "priority") and "priority" in error["message"]


async def test_a_deadline_that_preparing_used_up(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        prepare = service.preparation.completion

        async def slowly(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.05)
            return await prepare(*args, **kwargs)

        monkeypatch.setattr(service.preparation, "completion", slowly)
        call = Call(make_app(service), COMPLETIONS, completion(deadline_ms=10))
        error = (await call.done())["error"]
        assert (call.status, error["code"]) == (503, "deadline_exceeded")
        assert await engine.nothing_comes() and service._admission.accepted == 0


async def test_without_prefix_caching_nothing_is_hashed(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path, enable_prefix_caching=False) as (service, engine):
        assert (await finish(engine, Call(make_app(service), COMPLETIONS, completion()))).block_hashes == b""


async def test_a_servers_seed_repeats_a_run(demo_model: Path, tmp_path: Path) -> None:
    runs = []
    for run in range(2):
        folder = tmp_path / str(run)
        folder.mkdir()
        async with service_and_engine(demo_model, folder, seed=7) as (service, engine):
            app = make_app(service)
            bodies = (completion(), completion(), completion(seed=1))
            runs.append([(await finish(engine, Call(app, COMPLETIONS, body))).seed for body in bodies])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3 and runs[0][2] == 1


async def test_the_stop_text_may_stay(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        app = make_app(service)
        for include, text in ((True, "one two"), (False, "one")):
            body = completion(stop=" two", include_stop_str_in_output=include, max_tokens=100)
            call = Call(app, COMPLETIONS, body)
            number = (await engine.receive_add()).request
            ids = service.tokenizer.encode("one two three", add_special_tokens=False)
            engine.step((number, 0, ids, NONE))
            assert (await call.done())["choices"][0]["text"] == text
            assert await engine.receive_abort() == [number]


async def test_a_stop_text_counts_only_after_min_tokens(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion(stop=" two", min_tokens=4, max_tokens=100))
        number = (await engine.receive_add()).request
        ids = service.tokenizer.encode("one two three four two six", add_special_tokens=False)
        engine.step((number, 0, ids, NONE))
        assert (await call.done())["choices"][0]["text"] == "one two three four"
        assert await engine.receive_abort() == [number]


async def test_a_stop_text_that_the_end_completes_is_one(demo_model: Path, tmp_path: Path) -> None:
    """An incomplete character at the answer's end becomes U+FFFD, which may be what a stop waits for."""
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        call = Call(make_app(service), COMPLETIONS, completion(stop="ab\ufffd", max_tokens=100))
        number = (await engine.receive_add()).request
        text = service.tokenizer.encode("one ab", add_special_tokens=False)
        half = service.tokenizer.encode("\U0001f9a5", add_special_tokens=False)[:1]
        engine.step((number, 0, text + half, LENGTH))
        choice = (await call.done())["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")


async def test_control_tokens_may_be_shown(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        app = make_app(service)
        fields = {"skip_special_tokens": False, "include_stop_str_in_output": True}
        for more, text in (({}, "The"), (fields, "The<|im_end|>")):
            call = Call(app, COMPLETIONS, completion(**more))
            engine.step(((await engine.receive_add()).request, 0, [504, 2], STOP))
            assert (await call.done())["choices"][0]["text"] == text


async def test_the_chat_template_sees_what_it_is_given(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        app = make_app(service)
        said = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "The capital of"}]
        texts = []
        for fields in (
            {"continue_final_message": True},
            {"add_generation_prompt": False},
            {},
        ):
            call = Call(app, CHAT, {"model": "demo", "messages": said, "max_tokens": 1, **fields})
            add = await finish(engine, call)
            texts.append(service.tokenizer.decode(unpack(add.prompt).tolist(), skip_special_tokens=False))
        assert texts[0].endswith("<|im_start|>assistant\nThe capital of")
        assert texts[1].endswith("The capital of<|im_end|>\n")
        assert texts[2].endswith("The capital of<|im_end|>\n<|im_start|>assistant\n")


async def test_the_limits_of_this_server(demo_model: Path, tmp_path: Path) -> None:
    settings = {"max_logprobs": 3, "max_body_bytes": 2000}
    async with service_and_engine(demo_model, tmp_path, **settings) as (service, _):
        app = make_app(service)
        for body, param in (
            (completion(logprobs=4), "logprobs"),
            (completion(prompt_logprobs=4), "prompt_logprobs"),
            (completion(stop_token_ids=[49152]), "stop_token_ids"),
            (completion(logit_bias={"49152": 1}), "logit_bias"),
            (completion(allowed_token_ids=[49152]), "allowed_token_ids"),
        ):
            call = Call(app, COMPLETIONS, body)
            error = (await call.done())["error"]
            assert (call.status, error["param"]) == (400, param)
        call = Call(app, COMPLETIONS, completion(stop="x" * 1000, user="y" * 1000))
        assert (await call.done())["error"]["code"] == "body_too_large" and call.status == 413


async def test_unknown_fields_may_be_warned_of(
    demo_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with service_and_engine(demo_model, tmp_path, unknown_fields="warn") as (service, engine):
        for _ in range(2):
            await finish(engine, Call(make_app(service), COMPLETIONS, completion(odd_one=1)))
        messages = [{"role": "user", "content": "x", "odd_two": i} for i in range(3)]
        body = {"model": "demo", "messages": messages[:1] + messages}
        for _ in range(2):
            await Call(make_app(service), RENDER_PATH, body).done()
        assert [r.message for r in caplog.records if "unknown" in r.message] == [
            "a request has the unknown field 'odd_one': it is ignored",
            "a request has the unknown field 'messages[0].odd_two': it is ignored",
        ]


async def test_keys(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path, api_key=("first", "sécond")) as (service, engine):
        app = make_app(service)
        for header in (None, "Bearer", "Bearer ", "Bearer firs", "Bearer first2", "first", "Basic first"):
            for path in ("/v1/models", "/metrics", "/version", "/nowhere", "/docs"):
                call = Call(app, path, None, {"authorization": header} if header else None)
                error = (await call.done())["error"]
                assert (call.status, error["code"]) == (401, "invalid_api_key"), (header, path)
                assert call.headers["www-authenticate"] == "Bearer" and call.headers["x-request-id"]
        for path in ("/health", "/health/live", "/health/ready"):
            call = Call(app, path, None)
            await call.done()
            assert call.status == 200
        for header in ("Bearer first", "bearer sécond"):
            await finish(engine, Call(app, COMPLETIONS, completion(), {"authorization": header}))
        refused = b'servelite_requests_refused_total{model_name="demo",reason="invalid_api_key"} 35.0'
        assert refused in service.metrics.expose()


async def test_tokenize_and_back(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        app = make_app(service)
        body = await Call(app, "/tokenize", {"prompt": "Hello, wörld", "return_token_strs": True}).done()
        assert body["tokens"] == service.tokenizer.encode("Hello, wörld", add_special_tokens=True)
        assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 512)
        assert "".join(body["token_strs"]) == "Hello, wörld"
        back = await Call(app, "/detokenize", {"model": "demo", "tokens": body["tokens"]}).done()
        assert back == {"prompt": "Hello, wörld"}
        chat = await Call(app, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).done()
        assert chat["token_strs"] is None
        text = (await Call(app, "/detokenize", {"tokens": chat["tokens"]}).done())["prompt"]
        assert text.startswith("<|im_start|>") and text.endswith("<|im_start|>assistant\n")
        for path, wrong, status in (
            ("/tokenize", {}, 400),
            ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400),
            ("/tokenize", {"prompt": "x", "model": "other"}, 404),
            ("/tokenize", b"{", 400),
            ("/detokenize", {"tokens": [49152]}, 400),
            ("/detokenize", {"tokens": "x"}, 400),
        ):
            call = Call(app, path, wrong)
            assert "error" in await call.done() and call.status == status


async def test_never_two_bos(tmp_path: Path) -> None:
    """A template that writes BOS gets no second one, a prompt gets the model's, token IDs get none."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    model = save(tmp_path / "m", sentencepiece(), **names)
    async with service_and_engine(model, tmp_path, served_model_name=("demo",)) as (service, engine):
        app = make_app(service)
        bos = service.tokenizer.bos_token_id
        chat = {"model": "demo", "messages": [{"role": "user", "content": "<s>hi"}], "max_tokens": 1}
        for path, body, count in (
            (CHAT, chat, 1),
            (COMPLETIONS, completion(prompt="<s>hi"), 1),
            (COMPLETIONS, completion(prompt="<s>hi<s>", add_special_tokens=False), 1),
            (COMPLETIONS, completion(prompt="hi<s>", add_special_tokens=False), 0),
            (COMPLETIONS, completion(prompt=[5, 6]), 0),
        ):
            call = Call(app, path, body)
            add = await engine.receive_add()
            ids = unpack(add.prompt).tolist()
            assert ids.count(bos) == count and (not count or ids[0] == bos), ids
            if isinstance(body.get("prompt"), str):
                fields = {name: body[name] for name in ("prompt", "add_special_tokens") if name in body}
                assert (await Call(app, "/tokenize", fields).done())["tokens"] == ids
            engine.step((add.request, 0, [5], LENGTH))
            await call.done()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, completion(max_tokens=600), "max_tokens"),
        (COMPLETIONS, {"model": "demo", "prompt": [504] * 512}, "prompt"),
        (COMPLETIONS, {"model": "demo", "prompt": [504] * 512, "max_tokens": 0}, "prompt"),
        (CHAT, {"max_tokens": 600}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 600}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
    ],
)
async def test_what_is_too_long_is_named(
    demo_model: Path, tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    if path == CHAT:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]} | body
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        call = Call(make_app(service), path, body)
        error = (await call.done())["error"]
        assert (call.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
