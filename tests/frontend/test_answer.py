"""From tokens to text: stop strings, stop tokens, what counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from servelite.frontend.sampling import Sampling
from tests.frontend.fake_engine import LENGTH, NONE, STOP, service_and_engine

TEXT = "one two three four five"


@pytest.mark.parametrize("at_once", [1, 2, 100])
async def test_a_stop_string_ends_the_answer(demo_model: Path, tmp_path: Path, at_once: int) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling(max_tokens=90, stop=(" three", "zzz")))
        number = (await engine.receive_add()).request
        ids = service.tokenizer.encode(TEXT, add_special_tokens=False)
        needed = len(service.tokenizer.encode("one two three", add_special_tokens=False))
        for i in range(0, len(ids), at_once):
            engine.step((number, i, ids[i : i + at_once], NONE))
        text = ""
        while answer.finish_reason is None:
            text += await asyncio.wait_for(answer.next(), 5)
        assert text == "one two"
        assert answer.finish_reason == "stop"
        assert answer.completion_tokens == needed
        assert answer.token_ids == ids[:needed]
        assert await engine.receive_abort() == [number]
        assert (
            b'servelite_request_success_total{finished_reason="stop",model_name="demo"} 1.0'
            in service.metrics.expose()
        )
        answer.close()
        assert await engine.nothing_comes()


async def test_what_was_held_back_comes_at_the_end(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling(max_tokens=90, stop=("three five",)))
        number = (await engine.receive_add()).request
        ids = service.tokenizer.encode("one two three", add_special_tokens=False)
        engine.step((number, 0, ids, NONE))
        assert await asyncio.wait_for(answer.next(), 5) == "one two "
        engine.step((number, len(ids), [], LENGTH))
        assert await asyncio.wait_for(answer.next(), 5) == "three"
        assert answer.finish_reason == "length"


async def test_a_stop_token_counts_and_is_no_text(demo_model: Path, tmp_path: Path) -> None:
    """Even one that is an ordinary token: what the model's files call an end is no text."""
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling(max_tokens=90))
        number = (await engine.receive_add()).request
        engine.step((number, 0, [504, 505], STOP))
        assert await asyncio.wait_for(answer.next(), 5) == "The"
        assert answer.completion_tokens == 2


async def test_control_tokens_in_the_middle_are_no_text(demo_model: Path, tmp_path: Path) -> None:
    async with service_and_engine(demo_model, tmp_path) as (service, engine):
        (answer,) = await service.complete([[10]], Sampling(max_tokens=90, ignore_eos=True))
        add = await engine.receive_add()
        assert add.sampling.stop_token_ids == ()
        engine.step((add.request, 0, [504, 2, 504], LENGTH))
        assert await asyncio.wait_for(answer.next(), 5) == "TheThe"
        assert answer.completion_tokens == 3
