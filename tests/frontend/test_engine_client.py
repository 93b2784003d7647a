"""The contract's front-end side, over a real socket: delivery exactly once, errors, dead epochs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servelite.frontend.engine_client import ContractMismatch, EngineClient
from servelite.frontend.errors import APIError, shutting_down
from servelite.frontend.protocol import RequestOptions
from servelite.frontend.sampling import Sampling
from servelite.frontend.writing import usage_of
from servelite.ipc.messages import CONTRACT_VERSION, Add, RequestError, Timings, TokenLogprobs, pack, unpack
from servelite.observability.metrics import Metrics
from tests.frontend.fake_engine import EPOCH, ERROR, LENGTH, NONE, STOP, FakeEngine, service_and_engine


async def read(answer: Any) -> str:
    text = ""
    while answer.finish_reason is None:
        text += await asyncio.wait_for(answer.next(), 5)
    return text


async def test_a_request_and_its_answer(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10, 11, 12]], Sampling(temperature=0.5, seed=-1, max_tokens=9))
        add = await engine.receive_add()
        assert unpack(add.prompt).tolist() == [10, 11, 12]
        assert (add.seed, add.attempt, add.produced) == ((1 << 64) - 1, 0, b"")
        assert (add.sampling.max_tokens, add.sampling.temperature) == (9, 0.5)
        assert add.sampling.stop_token_ids == service.tokenizer.eos_token_ids
        ids = service.tokenizer.encode("Hello there, world", add_special_tokens=False)
        engine.step((add.request, 0, ids[:2], NONE))
        engine.step((add.request, 2, [*ids[2:], 2], STOP), timings={add.request: Timings(0.5, 0, 0)})
        assert await read(answer) == "Hello there, world"
        assert answer.finish_reason == "stop"
        assert answer.token_ids == [*ids, 2]
        assert usage_of([answer]).to_dict() == {
            "prompt_tokens": 3,
            "completion_tokens": len(ids) + 1,
            "total_tokens": len(ids) + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert b'servelite_request_queue_time_seconds_sum{model_name="demo"} 0.5' in service.metrics.expose()


async def test_repeated_and_late_tokens_are_dropped(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling(max_tokens=9))
        number = (await engine.receive_add()).request
        engine.step((number, 0, [100, 101], NONE))
        engine.step((number, 0, [100, 101, 102], NONE))  # two known, one new
        engine.step((number, 3, [900], LENGTH), epoch=EPOCH - 1)  # a dead engine's late word
        engine.step((number, 1, [101, 102], NONE))
        engine.step((77, 0, [5], NONE), (number, 3, [103], LENGTH))  # 77: aborted long ago
        await read(answer)
        assert answer.token_ids == [100, 101, 102, 103]


async def test_a_resume_carries_what_was_produced(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling(max_tokens=9))
        first = await engine.receive_add()
        engine.step((first.request, 0, [100, 101], NONE))
        await answer.next()
        again = answer.record.resume_message(with_leader=False)
        assert unpack(again.produced).tolist() == [100, 101]
        assert (again.request, again.seed, again.prompt) == (first.request, first.seed, first.prompt)
        assert again.attempt == 1


async def test_lost_tokens_end_the_reader(demo_model: Path, tmp_path: Path) -> None:
    client = EngineClient(0, Metrics("demo"), lambda: 1)
    engine = FakeEngine(f"ipc://{tmp_path}/e.sock")
    reader = asyncio.create_task(client.run(f"ipc://{tmp_path}/e.sock", EPOCH))
    try:
        await engine.greet()
        await client.ready()
        record = client.submit(Add(1, pack([1]), Sampling().params(5, ()), seed=1), _place())
        engine.step(((await engine.receive_add()).request, 1, [100], NONE))
        with pytest.raises(ValueError, match="tokens 0 to 0 are missing"):
            await asyncio.wait_for(reader, 5)
        assert record.produced == []
    finally:
        engine.close()


def _place() -> Any:
    from servelite.frontend.admission import Admission

    return Admission(np.zeros((2, 64), np.int64), 0, 4, 4).enter()[0]


async def test_the_engines_refusal_has_its_status(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling(max_tokens=9))
        number = (await engine.receive_add()).request
        engine.step((number, 0, [], ERROR), errors={number: RequestError(503, "queue_full", "too many")})
        with pytest.raises(APIError) as caught:
            await read(answer)
        error = caught.value
        assert (error.status, error.code, error.message) == (503, "queue_full", "too many")
        assert 1 <= int(dict(error.headers)["retry-after"]) <= 2


async def test_tokens_before_an_error_are_delivered(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling(max_tokens=9))
        number = (await engine.receive_add()).request
        engine.step(
            (number, 0, [504], NONE), (number, 1, [], ERROR), errors={number: RequestError(500, "x", "y")}
        )
        assert await asyncio.wait_for(answer.next(), 5) == "The"
        with pytest.raises(APIError):
            await read(answer)


async def test_places_come_back(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path, max_num_seqs=1, max_waiting_requests=1) as (
        service,
        engine,
    ):
        (one,) = await service.complete([[10]], Sampling(max_tokens=9))
        (two,) = await service.complete([[10]], Sampling(max_tokens=9))
        with pytest.raises(APIError) as caught:
            await service.complete([[10]], Sampling(max_tokens=9))
        assert caught.value.code == "queue_full"
        numbers = [(await engine.receive_add()).request for _ in range(2)]
        engine.step((numbers[0], 0, [5], LENGTH))  # the end of the engine's work frees it, read or not
        await asyncio.sleep(0.05)
        (three,) = await service.complete([[10]], Sampling(max_tokens=9))
        await engine.receive_add()
        two.close()
        assert await engine.receive_abort() == [numbers[1]]
        with pytest.raises(APIError):  # refused for its prompt: no place is kept
            await service.complete([[1 << 20]], Sampling(max_tokens=9))
        with pytest.raises(APIError):
            await service.complete([[1] * 510], Sampling(max_tokens=9))
        (four,) = await service.complete([[10]], Sampling(max_tokens=9))
        for answer in (one, three, four):
            answer.close()
        assert service._admission.accepted == 0


async def test_closing_twice_aborts_once(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling(max_tokens=9))
        number = (await engine.receive_add()).request
        answer.close()
        answer.close()
        assert await engine.receive_abort() == [number]
        assert await engine.nothing_comes()


async def test_an_answer_that_has_ended_is_not_aborted(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling(max_tokens=1))
        engine.step(((await engine.receive_add()).request, 0, [100], LENGTH))
        await read(answer)
        answer.close()
        assert await engine.nothing_comes()
        text = service.metrics.expose()
        assert b'servelite_request_success_total{finished_reason="length",model_name="demo"} 1.0' in text
        assert b'finished_reason="abort"' not in text


async def test_all_can_be_failed_at_once(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        answers = [(await service.complete([[10]], Sampling(max_tokens=9)))[0] for _ in range(3)]
        for _ in answers:
            await engine.receive_add()
        assert service.engine.fail_all(shutting_down()) == 3
        for answer in answers:
            with pytest.raises(APIError, match="shutting down"):
                await read(answer)


async def test_another_contract_is_refused(tmp_path: Path) -> None:
    client = EngineClient(0, Metrics("demo"), lambda: 1)
    engine = FakeEngine(f"ipc://{tmp_path}/e.sock")
    reader = asyncio.create_task(client.run(f"ipc://{tmp_path}/e.sock", EPOCH))
    try:
        await engine.greet(contract=CONTRACT_VERSION + 1)
        with pytest.raises(ContractMismatch):
            await asyncio.wait_for(reader, 5)
    finally:
        engine.close()


async def test_a_slow_consumer_gets_everything_merged(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling(max_tokens=90))
        number = (await engine.receive_add()).request
        for i in range(50):
            engine.step((number, i, [100 + i], LENGTH if i == 49 else NONE))
        while len(answer.record.produced) < 50:
            await asyncio.sleep(0.01)
        await answer.next()
        assert answer.finish_reason == "length"
        assert answer.token_ids == list(range(100, 150))


async def test_logprobs_of_a_prompts_chunks_come_without_tokens(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        options = RequestOptions(prompt_logprobs=0)
        (answer,) = await service.complete([[10, 11, 12, 13]], Sampling(max_tokens=1), options)
        number = (await engine.receive_add()).request
        for first, values in ((1, [-1.0, -2.0]), (3, [-3.0])):
            part = TokenLogprobs(first, 0, np.array(values, "<f4").tobytes(), b"", b"")
            engine.step(prompt_logprobs={number: part})
        engine.step((number, 0, [100], LENGTH))
        await read(answer)
        table = answer.record.prompt_logprobs
        assert [table.at(index) for index in range(5)] == [
            None,
            *((logprob, [], []) for logprob in (-1.0, -2.0, -3.0)),
            None,
        ]
