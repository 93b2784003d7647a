"""The rings of an engine and its ranks: every kind of message, and no descriptor left."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from servelite.ipc.messages import (
    FromRank,
    KVGroup,
    NewRow,
    Plan,
    RankDone,
    RankReady,
    RunnerFacts,
    SamplingParams,
    StepResult,
    TokenLogprobs,
    pack,
)
from servelite.ipc.rank_group import EngineEnd, RankEnd, close_group, open_group
from servelite.ipc.ring import CAPACITY, RingWriter

FACTS = RunnerFacts(9, 16, 512, 1000, (KVGroup("full", (0, 1), 64),), "float32", "cpu", (("load", 0.5),))
LOGPROBS = TokenLogprobs(3, 1, b"1234", b"5678", b"abcd")


def a_plan(step: int, prompt: int = 3) -> Plan:
    new = NewRow(0, 1, pack(range(prompt)), prompt, 0, seed=5, choice=0, sampling=SamplingParams(4, 0.5))
    column = pack([1])
    return Plan(1, step, column, column, column, b"", column, column, column, (new,), needs_masks=True)


@pytest.mark.parametrize(
    "message",
    [
        RankReady(FACTS),
        RankDone(1, 2, 3),
        StepResult(1, 2, b"a", b"b", b"c", b"d", b"e", {7: LOGPROBS}, (0.1, 0.2), 9, {8: LOGPROBS}),
    ],
)
def test_messages_of_a_rank(message: FromRank) -> None:
    group = open_group(3)
    engine, rank = EngineEnd(group), RankEnd(group, 2)
    rank.send(message)
    assert engine.recv(2) == message
    engine.close()
    rank.close()
    close_group(group)


def test_plans_reach_every_rank_and_one_larger_than_the_ring_does_too() -> None:
    group = open_group(2)
    plans = [a_plan(1), a_plan(2, prompt=CAPACITY), a_plan(3)]
    got: list[list[Plan | bytes]] = [[], []]

    def follow(index: int) -> None:
        rank = RankEnd(group, index)
        for _ in plans:
            got[index] += [rank.recv_plan(), rank.recv_masks()]
        rank.close()

    ranks = [threading.Thread(target=follow, args=(index,)) for index in range(2)]
    for rank in ranks:
        rank.start()
    engine = EngineEnd(group)
    for plan in plans:
        engine.send_plan(plan)
        engine.send_masks(b"mask")
    for rank in ranks:
        rank.join(60)
    assert got == [[plans[0], b"mask", plans[1], b"mask", plans[2], b"mask"]] * 2
    engine.close()
    close_group(group)


def test_a_message_that_is_no_ranks_is_refused() -> None:
    group = open_group(1)
    engine, writer = EngineEnd(group), RingWriter(group.results[0])
    writer.send(msgspec.msgpack.encode(["nonsense"]))
    with pytest.raises(msgspec.ValidationError):
        engine.recv(0)
    engine.close()
    writer.close()
    close_group(group)


def test_a_group_closed_holds_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    group = open_group(4)
    assert group.size == 4 and not any(os.get_inheritable(fd) for fd in group.fds)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + len(group.fds)
    close_group(group)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
