"""From a dead engine to the next: what a front end resubmits, and what it tells the launcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from servelite.frontend.errors import APIError, engine_dead, quarantined
from servelite.frontend.protocol import RequestOptions
from servelite.frontend.sampling import Sampling
from servelite.frontend.service import Service
from servelite.ipc.messages import Hello, Timings, unpack
from tests.frontend.fake_engine import EPOCH, LENGTH, NONE, FakeEngine, service_and_engine


@asynccontextmanager
async def successor(service: Service, folder: Path, epoch: int = EPOCH + 1) -> AsyncIterator[FakeEngine]:
    """The engine has died; another one that has greeted the front end."""
    service.engine.lose()
    address = f"ipc://{folder}/e{epoch}.sock"
    engine = FakeEngine(address, epoch)
    reader = asyncio.create_task(service.engine.run(address, epoch))
    try:
        await engine.greet()
        await service.engine.ready()
        yield engine
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        engine.close()


async def read(answer: Any) -> None:
    while answer.finish_reason is None:
        await asyncio.wait_for(answer.next(), 5)


async def test_an_answer_goes_on_where_it_was(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        options = RequestOptions(prompt_logprobs=1, deadline_ms=500)
        (answer,) = await service.complete([[10, 11]], Sampling(max_tokens=9, seed=7), options)
        first = await engine.receive_add()
        engine.step((first.request, 0, [100, 101], NONE), timings={1: Timings(0, 0, 0, cached_tokens=1)})
        await answer.next()
        await asyncio.sleep(0.55)  # past its deadline, which no longer counts
        async with successor(service, tmp_path) as new:
            service.engine.resubmit()
            again = await new.receive_add()
            assert (again.request, again.prompt, again.seed) == (first.request, first.prompt, first.seed)
            assert (again.attempt, unpack(again.produced).tolist()) == (1, [100, 101])
            assert (again.deadline_ms, again.sampling.prompt_logprobs) == (-1, -1)
            assert again.sampling.max_tokens == first.sampling.max_tokens  # the answer's, not what is left
            new.step((first.request, 2, [900], LENGTH), epoch=EPOCH)  # a dead one's last word
            new.step((first.request, 2, [102], LENGTH), timings={1: Timings(0, 0, 0, cached_tokens=2)})
            await read(answer)
            assert answer.token_ids == [100, 101, 102]
            assert answer.record.cached_tokens == 1  # as it was told with the first token
            assert b'servelite_requests_resumed_total{model_name="demo"} 1.0' in service.metrics.expose()
            assert service._admission.accepted == 0


async def test_a_deadline_goes_on_while_there_is_no_engine(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (late,) = await service.complete([[10]], Sampling(), RequestOptions(deadline_ms=500))
        (early,) = await service.complete([[11]], Sampling(), RequestOptions(deadline_ms=60_000))
        await engine.receive_add(), await engine.receive_add()
        await asyncio.sleep(0.55)
        async with successor(service, tmp_path) as new:
            service.engine.resubmit()
            again = await new.receive_add()
            assert again.request == early.record.number and 0 < again.deadline_ms < 60_000
            with pytest.raises(APIError, match="did not begin within its"):
                await late.next()


async def test_followers_wait_again_only_for_a_prompt_that_is_computed_again(
    demo_model: Path, tmp_path: Path
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        fresh = await service.complete([[10] * 20], Sampling(), RequestOptions(n=2))
        begun = await service.complete([[11] * 20], Sampling(), RequestOptions(n=2))
        for _ in range(4):
            await engine.receive_add()
        engine.step((begun[0].record.number, 0, [100], NONE))
        await begun[0].next()
        async with successor(service, tmp_path) as new:
            service.engine.resubmit()
            adds = [await new.receive_add() for _ in range(4)]
            assert [add.prefix_of for add in adds] == [-1, fresh[0].record.number, -1, -1]


async def test_suspects_are_sent_as_they_are_named_and_told_of_when_they_pass(
    demo_model: Path, tmp_path: Path
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        passed: list[list[int]] = []
        service.engine.passed = passed.append
        answers = await service.complete([[10], [11], [12], [13]], Sampling(max_tokens=2))
        for _ in answers:
            await engine.receive_add()
        async with successor(service, tmp_path) as new:
            service.engine.resubmit([1, 2, 99])
            assert passed == [[99]]  # nobody knows it: it has ended
            assert [(await new.receive_add()).request for _ in range(2)] == [1, 2]
            assert await new.nothing_comes()
            new.step((1, 0, [100], NONE))
            await answers[0].next()
            assert passed[1:] == [[1]]
            new.step((1, 1, [100], LENGTH))  # told once
            await read(answers[0])
            answers[1].close()
            assert passed[2:] == [[2]]  # ended by its client
            assert await new.receive_abort() == [2]
            answers[2].close()  # while it was held back: the engine never heard of it
            assert passed[3:] == [[3]] and await new.nothing_comes()
            service.engine.quarantine(4, quarantined("SIGSEGV"))
            with pytest.raises(APIError, match=r"died twice .* SIGSEGV"):
                await answers[3].next()
            assert service._admission.accepted == 0


async def test_an_abort_while_there_is_no_engine(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (gone,) = await service.complete([[10]], Sampling(max_tokens=9))
        (stays,) = await service.complete([[11]], Sampling(max_tokens=9))
        await engine.receive_add(), await engine.receive_add()
        engine.step((1, 0, [100], NONE), (2, 0, [100], NONE))
        await gone.next(), await stays.next()
        service.engine.lose()
        gone.close()
        gone.close()
        assert await engine.nothing_comes()  # the dead one's socket
        async with successor(service, tmp_path) as new:
            service.engine.resubmit()
            assert (await new.receive_add()).request == 2
            assert await new.nothing_comes()
            new.step((1, 1, [101], NONE), (2, 1, [101], LENGTH))  # nobody's token harms nobody
            await read(stays)
            assert (stays.token_ids, gone.token_ids) == ([100, 101], [100])
            assert b'servelite_requests_resumed_total{model_name="demo"} 1.0' in service.metrics.expose()
            assert service._admission.accepted == 0


async def test_an_abort_that_a_dead_engine_gets(demo_model: Path, tmp_path: Path) -> None:
    """The engine is dead, and the front end has not been told."""
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (gone,) = await service.complete([[10]], Sampling())
        (stays,) = await service.complete([[11]], Sampling())
        await engine.receive_add(), await engine.receive_add()
        gone.close()  # nobody reads it
        async with successor(service, tmp_path) as new:
            service.engine.resubmit()
            assert (await new.receive_add()).request == stays.record.number
            assert await new.nothing_comes()
            stays.close()
            assert service._admission.accepted == 0


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_an_abort_of_a_choice_while_there_is_no_engine(
    demo_model: Path, tmp_path: Path, gone: int
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        answers = await service.complete([[10] * 20], Sampling(seed=1), RequestOptions(n=3))
        for _ in answers:
            await engine.receive_add()
        service.engine.lose()
        answers[gone].close()
        async with successor(service, tmp_path) as new:
            service.engine.resubmit()
            adds = [await new.receive_add() for _ in range(2)]
            assert await new.nothing_comes()
            assert [add.choice for add in adds] == [choice for choice in range(3) if choice != gone]
            # Whoever waited for the first one's prompt computes it; what all three share is the same.
            leader = answers[0].record.number if gone else -1
            assert [add.prefix_of for add in adds if add.choice] == [leader] * (2 if gone == 0 else 1)
            assert {(add.seed, add.prompt) for add in adds} == {(1, adds[0].prompt)}
            for answer in answers:
                answer.close()
            assert service._admission.accepted == 0


async def test_an_end_in_the_middle_of_resubmitting(demo_model: Path, tmp_path: Path) -> None:
    """The first choice's deadline has passed: it ends there and then, and the second one waits for nobody."""
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        first, second = await service.complete([[10] * 20], Sampling(), RequestOptions(n=2, deadline_ms=100))
        for _ in range(2):
            await engine.receive_add()
        await asyncio.sleep(0.15)
        async with successor(service, tmp_path) as new:
            service.engine.resubmit()
            again = await new.receive_add()
            assert (again.request, again.prefix_of) == (second.record.number, -1)
            with pytest.raises(APIError, match="did not begin within its"):
                await first.next()
            first.close()
            assert await new.nothing_comes()
            second.close()  # as their stream does, for which one failure is the end
            assert await new.receive_abort() == [second.record.number]
            assert service._admission.accepted == 0


@pytest.mark.parametrize("tokens", [[], [100]])
async def test_an_abort_of_what_has_been_resubmitted(
    demo_model: Path, tmp_path: Path, tokens: list[int]
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (gone,) = await service.complete([[10]], Sampling(max_tokens=9))
        (stays,) = await service.complete([[11]], Sampling(max_tokens=9))
        await engine.receive_add(), await engine.receive_add()
        if tokens:
            engine.step((1, 0, tokens, NONE))
            await gone.next()
        async with successor(service, tmp_path) as new:
            service.engine.resubmit()
            assert [(await new.receive_add()).request for _ in range(2)] == [1, 2]
            gone.close()
            assert await new.receive_abort() == [1]
            new.step((1, len(tokens), [101], NONE), (2, 0, [101], LENGTH))  # the first: on its way already
            await read(stays)
            assert gone.token_ids == tokens
            gone.close()
            assert await new.nothing_comes() and service._admission.accepted == 0


@pytest.mark.parametrize("resubmitted", [True, False])
async def test_an_abort_when_the_new_engine_has_died_as_well(
    demo_model: Path, tmp_path: Path, resubmitted: bool
) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (gone,) = await service.complete([[10]], Sampling())
        (stays,) = await service.complete([[11]], Sampling())
        await engine.receive_add(), await engine.receive_add()
        async with successor(service, tmp_path) as second:
            if resubmitted:
                service.engine.resubmit()
                assert [(await second.receive_add()).attempt for _ in range(2)] == [1, 1]
        async with successor(service, tmp_path, EPOCH + 2) as third:
            gone.close()
            service.engine.resubmit()
            again = await third.receive_add()
            assert (again.request, again.attempt) == (stays.record.number, 1 + resubmitted)
            assert await third.nothing_comes()
            stays.close()
            assert service._admission.accepted == 0


async def test_what_is_lost_can_be_given_up(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling())
        await engine.receive_add()
        service.engine.lose()
        assert service.engine.fail_lost(engine_dead("x")) == 1
        with pytest.raises(APIError, match="has died: x"):
            await answer.next()
        assert service.engine.fail_lost(engine_dead("x")) == 0


async def test_what_the_dead_engine_counted_stays_counted(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        await service.complete([[10]], Sampling())
        await engine.receive_add()
        for _ in range(3):
            engine.step((1, 0, [5], NONE))
        while service.metrics.engine.load.steps < 3:
            await asyncio.sleep(0.001)
        async with successor(service, tmp_path) as new:
            new.step((1, 1, [5], NONE))
            while not service.metrics.engine.load.steps:
                await asyncio.sleep(0.001)
            text = service.metrics.expose()
            assert b'servelite_engine_steps_total{model_name="demo"} 4.0' in text
            # Lives are counted from 0, the earlier ones too that this front end never saw.
            assert f'servelite_engine_restarts_total{{model_name="demo"}} {EPOCH + 1}.0'.encode() in text


async def test_a_second_hello_is_sent_to_each_engine(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, _):
        for epoch in (EPOCH + 1, EPOCH + 2):
            address = f"ipc://{tmp_path}/again{epoch}.sock"
            engine = FakeEngine(address, epoch)
            reader = asyncio.create_task(service.engine.run(address, epoch))
            assert isinstance(await engine.receive(), Hello)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            engine.close()
