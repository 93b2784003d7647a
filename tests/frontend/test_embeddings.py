"""`/v1/embeddings` over an engine that does what the test says."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from servelite.frontend.app import make_app
from servelite.frontend.service import Service
from servelite.ipc.messages import Add, Kind, Pooling, unpack
from servelite.tokenizer.tokenizer import Tokenizer
from tests.frontend.asgi import Call
from tests.frontend.fake_engine import STOP, FakeEngine, service_and_engine
from tests.frontend.test_resume import successor

PATH = "/v1/embeddings"
VECTOR = np.array([3.0, 4.0, 12.0], "<f4")  # of length 13
FACTS = {"pooling": Pooling("last", True, 3)}


@asynccontextmanager
async def app_and_engine(
    model: Path, folder: Path, facts: dict[str, Any] = FACTS, **settings: Any
) -> AsyncIterator[tuple[FastAPI, FakeEngine, Service]]:
    async with service_and_engine(model, folder, facts=facts, **settings) as (service, engine):
        yield make_app(service), engine, service


def give(engine: FakeEngine, *adds: Add, vector: np.ndarray = VECTOR) -> None:
    """A step in which each of `adds` ends with a vector."""
    rows = [(add.request, 0, [], STOP) for add in adds]
    engine.step(*rows, vectors={add.request: vector.tobytes() for add in adds})


async def test_a_vector_as_numbers_and_as_bytes(demo_model: Path, tmp_path: Path) -> None:
    async with app_and_engine(demo_model, tmp_path) as (app, engine, service):
        for fields, read in (
            ({}, lambda shown: np.array(shown, "<f4")),
            ({"encoding_format": "base64"}, lambda shown: np.frombuffer(base64.b64decode(shown), "<f4")),
        ):
            call = Call(app, PATH, {"model": "demo", "input": "hello you"} | fields)
            add = await engine.receive_add()
            assert (add.kind, add.sampling.max_tokens, add.sampling.temperature) == (Kind.POOL, 1, 0.0)
            assert unpack(add.prompt).tolist() == service.tokenizer.encode(
                "hello you", add_special_tokens=True
            )
            give(engine, add)
            body = await call.done()
            assert call.status == 200 and body["object"] == "list" and body["model"] == "demo"
            (item,) = body["data"]
            assert (item["object"], item["index"]) == ("embedding", 0)
            np.testing.assert_array_equal(read(item["embedding"]), VECTOR / np.float32(13))
            assert body["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
        assert service._admission.accepted == 0


@pytest.mark.parametrize(("normalize", "expected"), [(True, [0.6, 0.8]), (False, [3.0, 4.0])])
async def test_a_cut_vector_is_as_long_as_the_whole(
    demo_model: Path, tmp_path: Path, normalize: bool, expected: list[float]
) -> None:
    facts = {"pooling": Pooling("last", normalize, 3)}
    async with app_and_engine(demo_model, tmp_path, facts) as (app, engine, _):
        call = Call(app, PATH, {"model": "demo", "input": [[1, 2]], "dimensions": 2})
        give(engine, await engine.receive_add())
        assert (await call.done())["data"][0]["embedding"] == pytest.approx(expected, abs=1e-7)
        call = Call(app, PATH, {"model": "demo", "input": "a", "dimensions": 4})
        error = (await call.done())["error"]
        assert (
            (call.status, error["param"]) == (400, "dimensions")
            and "4" in error["message"]
            and "3" in error["message"]
        )


async def test_a_vector_of_zeros_stays_one(demo_model: Path, tmp_path: Path) -> None:
    async with app_and_engine(demo_model, tmp_path) as (app, engine, _):
        call = Call(app, PATH, {"model": "demo", "input": "a"})
        give(engine, await engine.receive_add(), vector=VECTOR * 0)
        assert (await call.done())["data"][0]["embedding"] == [0.0, 0.0, 0.0]


async def test_many_inputs_go_a_window_at_a_time_and_come_in_order(demo_model: Path, tmp_path: Path) -> None:
    """Eight at the engine at once, twice its rows; they end in whatever order."""
    async with app_and_engine(demo_model, tmp_path, max_num_seqs=4, max_waiting_requests=16) as (
        app,
        engine,
        service,
    ):
        call = Call(app, PATH, {"model": "demo", "input": [[i + 1] * (i + 1) for i in range(20)]})
        adds = [await engine.receive_add() for _ in range(8)]
        assert await engine.nothing_comes()
        assert service._admission.accepted == 8
        seen = 0
        while adds:
            seen += len(adds)
            for add in reversed(adds):
                give(engine, add, vector=np.array([1.0, len(unpack(add.prompt)), 0.0], "<f4"))
            adds = [await engine.receive_add() for _ in range(min(8, 20 - seen))]
        body = await call.done()
        assert [item["index"] for item in body["data"]] == list(range(20))
        assert [item["embedding"][1] / item["embedding"][0] for item in body["data"]] == pytest.approx(
            range(1, 21)
        )
        assert body["usage"]["total_tokens"] == 210
        assert service._admission.accepted == 0


async def test_the_window_is_no_wider_than_the_tokens_that_may_wait(demo_model: Path, tmp_path: Path) -> None:
    async with app_and_engine(demo_model, tmp_path, max_waiting_tokens=100) as (app, engine, _):
        call = Call(app, PATH, {"model": "demo", "input": [[1] * 45, [2] * 45, [3] * 45]})
        first, second = await engine.receive_add(), await engine.receive_add()
        assert await engine.nothing_comes()
        give(engine, first)
        third = await engine.receive_add()
        give(engine, second, third)
        assert len((await call.done())["data"]) == 3


async def test_a_client_that_is_gone_leaves_nothing_behind(demo_model: Path, tmp_path: Path) -> None:
    async with app_and_engine(demo_model, tmp_path) as (app, engine, service):
        call = Call(app, PATH, {"model": "demo", "input": ["a", "b"]})
        numbers = [(await engine.receive_add()).request for _ in range(2)]
        call.vanish()
        await asyncio.wait_for(call.task, 5)
        assert [*(await engine.receive_abort()), *(await engine.receive_abort())] == numbers
        assert service._admission.accepted == 0 and service.lifecycle.answers == 0


async def test_a_batch_goes_on_with_the_next_engine(demo_model: Path, tmp_path: Path) -> None:
    """The rest of it too, of which no engine knows yet when the first one dies."""
    async with app_and_engine(demo_model, tmp_path, max_num_seqs=1, max_waiting_requests=1) as (
        app,
        engine,
        service,
    ):
        call = Call(app, PATH, {"model": "demo", "input": [[i + 1] for i in range(5)]})
        first, second = await engine.receive_add(), await engine.receive_add()
        give(engine, first)
        third = await engine.receive_add()
        async with successor(service, tmp_path) as heir:
            service.engine.resubmit([second.request])
            again = await heir.receive_add()
            assert (again.request, again.attempt) == (second.request, 1)
            give(heir, again)
            assert await heir.nothing_comes()  # the fourth is taken, and waits until all may go on
            service.engine.resubmit()
            rest = [await heir.receive_add(), await heir.receive_add()]
            assert rest[0].request == third.request
            assert [unpack(add.prompt).tolist() for add in rest] == [[3], [4]]
            give(heir, *rest)
            give(heir, await heir.receive_add())
            assert len((await call.done())["data"]) == 5


async def test_an_engine_that_is_dead_for_good_is_an_error(demo_model: Path, tmp_path: Path) -> None:
    async with app_and_engine(demo_model, tmp_path, max_num_seqs=1, max_waiting_requests=0) as (
        app,
        engine,
        service,
    ):
        call = Call(app, PATH, {"model": "demo", "input": [[1], [2]]})
        record = service.engine._active[(await engine.receive_add()).request]
        # It dies between the first one's end and the second one's beginning.
        record.deliver(0, [], STOP)
        service.engine.lose()
        service.lifecycle.lose_engine("tired")
        error = (await call.done())["error"]
        assert (call.status, error["code"]) == (503, "engine_dead")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": ["a", ""]}, "input[1]", "no tokens"),
        ({"input": [[1], [49152]]}, "input[1]", "49151"),
        ({"input": ["a", [1] * 513]}, "input[1]", "512"),
        ({"input": "a " * 600}, "input", "512"),
        ({"input": [[1]] * 2049}, "input", "2048"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": "a", "priority": 1}, "priority", "--scheduling-policy"),
        ({"input": "a", "stream": True}, "stream", "Unknown"),
        ({"input": "a", "model": "other"}, "model", "demo"),
    ],
)
async def test_what_cannot_be_embedded_is_refused(
    demo_model: Path, tmp_path: Path, fields: dict[str, Any], param: str, words: str
) -> None:
    async with app_and_engine(demo_model, tmp_path) as (app, engine, service):
        call = Call(app, PATH, {"model": "demo"} | fields)
        error = (await call.done())["error"]
        assert call.status == (404 if param == "model" else 400)
        assert error["param"].startswith(param) and words in error["message"]
        assert await engine.nothing_comes() and service._admission.accepted == 0


async def test_a_full_server_refuses_and_says_when_to_come_back(demo_model: Path, tmp_path: Path) -> None:
    async with app_and_engine(demo_model, tmp_path, max_num_seqs=1, max_waiting_requests=1) as (
        app,
        engine,
        _,
    ):
        first = Call(app, PATH, {"model": "demo", "input": ["a", "b", "c"]})
        await engine.receive_add()
        second = Call(app, PATH, {"model": "demo", "input": "d"})
        assert (await second.done())["error"]["code"] == "queue_full"
        assert second.status == 503 and int(second.headers["retry-after"]) >= 1
        first.vanish()
        await first.task


async def test_an_encoder_serves_nothing_else(demo_model: Path, tmp_path: Path) -> None:
    facts = FACTS | {"encoder": True}
    async with app_and_engine(demo_model, tmp_path, facts) as (app, engine, service):
        hi = [{"role": "user", "content": "hi"}]
        for path, more in (
            ("/v1/chat/completions", {"messages": hi, "stream": True}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/responses", {"input": "hi"}),
            ("/v1/messages", {"messages": hi, "max_tokens": 1}),
        ):
            call = Call(app, path, {"model": "demo"} | more)
            error = (await call.done())["error"]
            assert call.status == 400 and "/v1/embeddings only" in error["message"]
        call = Call(app, PATH, {"model": "demo", "input": [[1] * 40]})
        add = await engine.receive_add()
        assert not add.block_hashes  # nobody looks at them
        give(engine, add)
        assert (await call.done())["data"]
        assert service._admission.accepted == 0


async def test_an_engine_without_vectors_refuses(demo_model: Path, tmp_path: Path) -> None:
    async with app_and_engine(demo_model, tmp_path, {}) as (app, _, _):
        call = Call(app, PATH, {"model": "demo", "input": "a"})
        assert (await call.done())["error"]["param"] == "model" and call.status == 400


async def test_of_a_text_its_own_tokens_are_cut(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text's BOS and EOS stay, as an encoder's [CLS] and [SEP] do."""
    async with app_and_engine(demo_model, tmp_path, FACTS | {"max_model_len": 9}) as (app, engine, service):
        monkeypatch.setattr(Tokenizer, "affixes", property(lambda self: ([1], [2])))
        whole = service.tokenizer.encode("a b c d e f g h i j", add_special_tokens=False)
        for fields, expected in (
            ({"truncate_prompt_tokens": 5}, [1, *whole[-3:], 2]),
            ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, [1, *whole[:3], 2]),
            ({"truncate_prompt_tokens": -1}, [1, *whole[-7:], 2]),
            ({"truncate_prompt_tokens": 5, "add_special_tokens": False}, whole[-5:]),
            ({"truncate_prompt_tokens": 5, "input": [whole]}, whole[-5:]),
            ({"truncate_prompt_tokens": 3}, [1, whole[-1], 2]),
            ({"truncate_prompt_tokens": 1, "input": [whole]}, whole[-1:]),
        ):
            call = Call(app, PATH, {"model": "demo", "input": "a b c d e f g h i j"} | fields)
            add = await engine.receive_add()
            assert unpack(add.prompt).tolist() == expected, fields
            give(engine, add)
            await call.done()
            assert call.status == 200
        for size in (0, 1, 2):  # such texts would all be alike
            call = Call(app, PATH, {"model": "demo", "input": "a b c", "truncate_prompt_tokens": size})
            assert (await call.done())["error"]["param"] == "truncate_prompt_tokens" and call.status == 400
