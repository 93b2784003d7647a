"""Loading, serving, draining, without an engine: who may come in, and when the last one has left."""

from __future__ import annotations

import asyncio

import pytest

from servelite.frontend import lifecycle as module
from servelite.frontend.errors import APIError
from servelite.frontend.lifecycle import Lifecycle


def test_a_new_engine_does_not_end_a_drain() -> None:
    lifecycle = Lifecycle()
    lifecycle.serve()
    lifecycle.refuse()
    lifecycle.wait_for_engine()
    lifecycle.serve()
    assert (lifecycle.ready, refusal(lifecycle)) == (False, "server_shutting_down")


def refusal(lifecycle: Lifecycle) -> str | None:
    try:
        lifecycle.check()
    except APIError as error:
        assert error.status == 503
        return error.code
    return None


def test_who_may_come_in() -> None:
    lifecycle = Lifecycle()
    assert (lifecycle.ready, refusal(lifecycle)) == (False, "engine_not_ready")
    lifecycle.serve()
    assert (lifecycle.ready, refusal(lifecycle)) == (True, None)
    lifecycle.stall(True)
    assert (lifecycle.ready, refusal(lifecycle)) == (False, None)
    lifecycle.stall(False)
    assert (lifecycle.ready, refusal(lifecycle)) == (True, None)
    lifecycle.wait_for_engine()
    assert (lifecycle.ready, refusal(lifecycle)) == (False, "engine_not_ready")
    lifecycle.stall(True)  # late: of the engine that is dead
    lifecycle.serve()
    assert (lifecycle.ready, refusal(lifecycle)) == (True, None)
    lifecycle.retire()  # balancers are told first, requests are still taken
    assert (lifecycle.ready, refusal(lifecycle)) == (False, None)
    lifecycle.refuse()
    assert (lifecycle.ready, refusal(lifecycle)) == (False, "server_shutting_down")
    lifecycle.lose_engine("x")
    assert (lifecycle.ready, refusal(lifecycle)) == (False, "engine_dead")


async def test_idle_is_when_the_last_answer_has_left() -> None:
    lifecycle = Lifecycle()
    await asyncio.wait_for(lifecycle.idle(), 1)
    with pytest.raises(ZeroDivisionError), lifecycle.answering(), lifecycle.answering():
        waiter = asyncio.create_task(lifecycle.idle())
        await asyncio.sleep(0)
        assert not waiter.done() and lifecycle.answers == 2
        raise ZeroDivisionError
    await asyncio.wait_for(waiter, 1)


def test_a_refusal_that_is_raised_often_holds_no_frames() -> None:
    lifecycle = Lifecycle()
    depths = []
    for _ in range(3):
        try:
            lifecycle.check()
        except APIError as error:
            trace, depth = error.__traceback__, 0
            while trace is not None:
                trace, depth = trace.tb_next, depth + 1
            depths.append(depth)
    assert len(set(depths)) == 1


async def never() -> bytes:
    await asyncio.sleep(60)
    return b""


async def test_a_body_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_S", 0.05)
    lifecycle = Lifecycle()
    lifecycle.serve()
    with pytest.raises(APIError) as caught:
        await asyncio.wait_for(lifecycle.arrival(never()), 5)
    assert (caught.value.status, caught.value.code) == (408, "request_timeout")
    assert ("connection", "close") in caught.value.headers
    assert await lifecycle.arrival(asyncio.sleep(0, b"x")) == b"x"


@pytest.mark.parametrize("lost", [False, True])
async def test_bodies_that_have_not_come_do_not_keep_a_drain_waiting(lost: bool) -> None:
    lifecycle = Lifecycle()
    lifecycle.serve()
    waiting = [asyncio.create_task(lifecycle.arrival(never())) for _ in range(3)]
    await asyncio.sleep(0)
    lifecycle.retire()
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in waiting)  # requests are still taken
    lifecycle.lose_engine("x") if lost else lifecycle.refuse()
    lifecycle.refuse()  # twice, as when a second signal comes
    for task in waiting:
        with pytest.raises(APIError) as caught:
            await asyncio.wait_for(task, 5)
        assert caught.value.status == 503
