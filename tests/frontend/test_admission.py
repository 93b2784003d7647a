"""The door: bounded over all front ends, places given back exactly once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from servelite.frontend.admission import Admission
from servelite.frontend.app import make_app
from servelite.frontend.errors import APIError, bad_request
from tests.frontend.asgi import Call
from tests.frontend.fake_engine import service_and_engine


def test_the_sum_over_front_ends_is_bounded() -> None:
    slots = np.zeros((2, 64), np.int64)
    one, two = Admission(slots, 0, 2, 1), Admission(slots, 1, 2, 1)
    places = [*one.enter(), *two.enter(2)]
    assert slots[0, :2].tolist() == [1, 2]
    for admission in (one, two):
        with pytest.raises(APIError) as caught:
            admission.enter()
        assert (caught.value.status, caught.value.code) == (503, "queue_full")
        assert 1 <= int(dict(caught.value.headers)["retry-after"]) <= 90
    places[1].leave()
    places[1].leave()
    assert slots[0, :2].tolist() == [1, 1]
    one.enter()


def test_several_places_are_all_or_none() -> None:
    admission = Admission(np.zeros((2, 64), np.int64), 0, 2, 2)
    admission.enter(3)
    with pytest.raises(APIError) as full:
        admission.enter(2)
    assert full.value.status == 503 and admission.accepted == 3
    with pytest.raises(APIError) as never:
        admission.enter(5)
    assert (never.value.status, never.value.code) == (400, "too_many_answers")
    admission.enter(1)


def test_a_restarted_front_end_begins_at_zero() -> None:
    slots = np.full((2, 64), 7, np.int64)
    assert Admission(slots, 3, 2, 1).accepted == 0
    assert slots.sum() == 2 * 7 * 63


def test_retry_after_follows_the_rate_of_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("servelite.frontend.admission.time.monotonic", lambda: now[0])
    monkeypatch.setattr("servelite.frontend.admission.random.uniform", lambda low, high: low)
    admission = Admission(np.zeros((2, 64), np.int64), 0, 1, 40)
    for place in admission.enter(10):
        place.leave()
        now[0] += 1.0  # one ends each second
    for _ in range(41):
        admission.enter()
    with pytest.raises(APIError) as caught:
        admission.enter()
    assert dict(caught.value.headers)["retry-after"] == "20"  # 40 wait: half of them need 20 s


async def test_a_request_in_preparation_is_no_work_of_the_engine(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = asyncio.Event()

    async def check(grammar: str, field: str) -> str:
        await checked.wait()
        raise bad_request("no", field)

    facts = {"features": ("grammar",)}
    async with service_and_engine(demo_model, tmp_path, facts=facts) as (service, _):
        monkeypatch.setattr(service.preparation, "check_grammar", check)
        grammar = {"structured_outputs": {"regex": "a"}}
        messages = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        call = Call(make_app(service), "/v1/chat/completions", messages | grammar)
        admission = service._admission
        async with asyncio.timeout(30):
            while not admission.accepted:
                await asyncio.sleep(0.01)
        accepted, preparing = admission._slots, admission._preparing  # what the launcher looks at
        assert (accepted[0], preparing[0]) == (1, 1)
        checked.set()
        await call.done()
        assert (accepted[0], preparing[0]) == (0, 0)


async def test_a_request_whose_client_leaves_while_it_is_prepared_is_prepared_no_further(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[BaseException] = []

    async def check(grammar: str, field: str) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            ended.append(error)
            raise
        return grammar

    facts = {"features": ("grammar",)}
    async with service_and_engine(demo_model, tmp_path, facts=facts) as (service, _):
        monkeypatch.setattr(service.preparation, "check_grammar", check)
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        call = Call(make_app(service), "/v1/chat/completions", body | {"structured_outputs": {"regex": "a"}})
        async with asyncio.timeout(30):
            while not service._admission.accepted:
                await asyncio.sleep(0.01)
            call.vanish()
            await call.task
        assert len(ended) == 1 and service._admission.accepted == 0 and call.status == 0
