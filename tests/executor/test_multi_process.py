"""Ranks in processes of their own: the tokens of one process, in lockstep, or an end with a reason."""

from __future__ import annotations

import dataclasses
import os
import re
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from servelite.config import Settings
from servelite.executor.multi_process import MultiProcessExecutor, RanksDivergedError
from servelite.ipc import ring
from servelite.ipc.messages import (
    CONTRACT_VERSION,
    Add,
    Boot,
    FinishReason,
    Hello,
    KVGroup,
    Plan,
    RankDone,
    RankGroup,
    RankReady,
    Ready,
    RunnerFacts,
    SamplingParams,
    StepResult,
    Stop,
    pack,
)
from servelite.ipc.process import ExitCode
from servelite.ipc.progress import ProgressPage
from servelite.ipc.rank_group import RankEnd, close_group, open_group
from servelite.ipc.sockets import connect_engine, decode_from_engine, encode, engine_address
from servelite.launcher.child import Child
from servelite.worker.load import load_runner
from tests.engine_harness import Answer, Harness, prompt
from tests.tokenizer import small_folder

FACTS = RunnerFacts(64, 4, 64, 1000, (KVGroup("full", (0,), 32),), "none", "none", (("load", 0.5),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder.save(tmp_path_factory.mktemp("model"), small_folder.sentencepiece(), vocab_size=1000)


def settings_of(model: Path, **values: object) -> Settings:
    fields = {
        "model": str(model), "executor": "simulated", "simulated_step_ms": 0.0, "max_model_len": 256,
        "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "debug": True,
    }  # fmt: skip
    return Settings(**(fields | values))  # type: ignore[arg-type]


def a_plan(step: int, needs_masks: bool = False) -> Plan:
    return Plan(1, step, b"", b"", b"", b"", b"", b"", b"", needs_masks=needs_masks)


def a_result(step: int, checksum: int = 0, epoch: int = 1) -> StepResult:
    return StepResult(epoch, step, b"", b"", b"", b"", b"", checksum=checksum)


@contextmanager
def a_group(size: int) -> Iterator[RankGroup]:
    group = open_group(size)
    try:
        yield group
    finally:
        close_group(group)


@contextmanager
def children(
    settings: Settings,
    group: RankGroup,
    folder: Path = Path("/"),
    *,
    ranks: bool = True,
    engine: bool = False,
) -> Iterator[list[Child]]:
    """The engine's process, one for each rank, or all of them, started as the launcher does."""
    page = ProgressPage.create()
    address = engine_address(str(folder), 0, 1)
    started: list[Child] = []
    modules = [("servelite.engine", 0)] * engine
    modules += [("servelite.worker", rank) for rank in range(group.size * ranks)]
    try:
        for module, index in modules:
            boot = Boot(settings.to_dict(), index, 1, address, page.fd, folder=str(folder), group=group)
            started.append(Child.start(module, module, boot, (page.fd, *group.fds), share=2))
        yield started
    finally:
        for child in started:
            child.kill()
            child.reap()
        os.close(page.fd)


def hear(child: Child) -> None:
    """Wait for the child's next words, or its death."""
    assert select.select([child.lifeline], [], [], 60)[0]
    child.receive()


def small(tokens: list[int]) -> list[int]:
    """Tokens that the model has."""
    return [token % 250 for token in tokens]


def answers_of(harness: Harness) -> dict[int, Answer]:
    """Of a few requests that come in two waves, greedy and seeded, too many for the batch."""
    for number in range(12):
        harness.add(small(prompt(5 + 9 * number, number)), max_tokens=3 + number, temperature=number % 3 / 2)
        if number == 5:
            harness.turn(4)
    harness.drain()
    harness.assert_empty()
    harness.close()
    return harness.answers


@pytest.mark.parametrize(("ranks", "depth"), [(2, 1), (3, 2), (2, 3)])
def test_the_tokens_are_those_of_one_process(model: Path, ranks: int, depth: int) -> None:
    alone = settings_of(model)
    expected = answers_of(Harness(alone, load_runner(alone, model)))
    assert all(answer.finish is FinishReason.LENGTH for answer in expected.values())
    settings = settings_of(model, tp=ranks, async_depth=depth)
    with a_group(ranks) as group, children(settings, group):
        assert answers_of(Harness(settings, MultiProcessExecutor(group))) == expected


def test_plans_larger_than_the_ring(model: Path) -> None:
    length = ring.CAPACITY // 2  # tokens of four bytes
    settings = settings_of(
        model, tp=2, async_depth=2, max_model_len=length + 10, max_num_seqs=4, block_size=256,
        max_num_batched_tokens=1 << 17, max_waiting_tokens=1 << 22,
    )  # fmt: skip
    with a_group(2) as group, children(settings, group):
        harness = Harness(settings, MultiProcessExecutor(group))
        long = [harness.add(small(prompt(length, salt)), max_tokens=3) for salt in range(3)]
        harness.drain()
        assert [harness.answers[number].finish for number in long] == [FinishReason.LENGTH] * 3
        harness.assert_empty()
        harness.close()


def test_facts_are_those_of_all_ranks() -> None:
    with a_group(2) as group:
        executor, ranks = MultiProcessExecutor(group), [RankEnd(group, rank) for rank in range(2)]
        ranks[0].send(RankReady(FACTS))
        ranks[1].send(RankReady(dataclasses.replace(FACTS, ledger=(("load", 9.0),))))
        assert executor.facts == dataclasses.replace(FACTS, ledger=())
        assert executor.facts is executor.facts, "it waits for them once"
        for end in (executor, *ranks):
            end.close()


def test_ranks_that_found_something_else_are_refused() -> None:
    with a_group(2) as group:
        executor, ranks = MultiProcessExecutor(group), [RankEnd(group, rank) for rank in range(2)]
        ranks[0].send(RankReady(FACTS))
        ranks[1].send(RankReady(dataclasses.replace(FACTS, num_blocks=63)))
        with pytest.raises(RanksDivergedError, match="rank 1 has num_blocks 63, rank 0 has 64"):
            _ = executor.facts
        for end in (executor, *ranks):
            end.close()


def test_masks_go_where_a_plan_needs_them() -> None:
    with a_group(1) as group:
        executor, rank = MultiProcessExecutor(group), RankEnd(group, 0)
        for step, masks in ((1, b"bits"), (2, None), (3, b"more")):
            plan = a_plan(step, needs_masks=masks is not None)
            executor.sample(executor.forward(plan), masks)
            assert rank.recv_plan() == plan
            if masks is not None:
                assert rank.recv_masks() == masks
        executor.close()
        executor.close()
        rank.close()


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        (a_result(2, 0xAB), RankDone(1, 2, 0xAC), "rank 1 answered step 2 with .*000000ac.*, not .*000000ab"),
        (a_result(3), RankDone(1, 2, 0), r"rank 0 answered step 2 with StepResult\(step 3"),
        (a_result(2, epoch=0), RankDone(1, 2, 0), "rank 0 answered step 2 with .*epoch 0"),
        (RankDone(1, 2, 0), RankDone(1, 2, 0), "rank 0 answered step 2 with RankDone"),
        (a_result(2), a_result(2), "rank 1 answered step 2 with StepResult"),
        (a_result(2), RankDone(1, 1, 0), r"rank 1 answered step 2 with RankDone\(step 1"),
        (a_result(2), RankReady(FACTS), "rank 1 answered step 2 with RankReady"),
    ],
)
def test_ranks_that_do_not_say_the_same_have_diverged(
    first: StepResult | RankDone, second: StepResult | RankDone | RankReady, complaint: str
) -> None:
    with a_group(2) as group:
        executor, ranks = MultiProcessExecutor(group), [RankEnd(group, rank) for rank in range(2)]
        for rank, message in zip(ranks, (first, second), strict=True):
            rank.send(message)
        with pytest.raises(RanksDivergedError, match=complaint):
            executor.forward(a_plan(2)).result()
        for end in (executor, *ranks):
            end.close()


def test_an_engine_whose_ranks_diverge_ends(model: Path, tmp_path: Path) -> None:
    """The engine's own process; this test plays the ranks."""
    with (
        a_group(2) as group,
        children(settings_of(model, tp=2), group, tmp_path, ranks=False, engine=True) as (engine,),
    ):
        ranks = [RankEnd(group, rank) for rank in range(2)]
        for rank in ranks:
            rank.send(RankReady(FACTS))
        hear(engine)
        sock = connect_engine(engine_address(str(tmp_path), 0, 1), 0)
        sock.send(encode(Hello(0, CONTRACT_VERSION)))
        sock.send(encode(Add(1, pack(range(9)), SamplingParams(max_tokens=4), seed=1)))
        plan = ranks[0].recv_plan()
        assert plan == ranks[1].recv_plan() and plan.step == 1
        ranks[0].send(a_result(1, 5))
        ranks[1].send(RankDone(1, 1, 6))
        hear(engine)
        engine.reap()
        assert engine.failed is not None and engine.failed.exit_code == ExitCode.INTERNAL
        assert engine.death().startswith("RanksDivergedError: rank 1 answered step 1")
        sock.close(0)
        for rank in ranks:
            rank.close()


def test_an_engine_and_its_ranks_as_processes(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tp=2)
    with a_group(2) as group, children(settings, group, tmp_path, engine=True) as (engine, *ranks):
        for child in (engine, *ranks):
            hear(child)
            assert child.failed is None
        titles = [Path(f"/proc/{child.pid}/cmdline").read_bytes().rstrip(b"\0") for child in (engine, *ranks)]
        assert titles == [b"servelite: engine core", b"servelite: worker 0", b"servelite: worker 1"]
        sock = connect_engine(engine_address(str(tmp_path), 0, 1), 0)
        sock.setsockopt(zmq.RCVTIMEO, 20_000)
        sock.send(encode(Hello(0, CONTRACT_VERSION)))
        ready = decode_from_engine(sock.recv())
        assert isinstance(ready, Ready) and ready.vocab_size == 264
        assert [phase for phase, _ in ready.ledger] == ["imports", "ranks"]
        assert "torch" not in Path(f"/proc/{engine.pid}/maps").read_text()
        engine.send(Stop())
        deadline = time.monotonic() + 20
        while engine.alive and time.monotonic() < deadline:
            engine.reap()
        assert not engine.alive and engine.failed is None
        sock.close(0)


@pytest.mark.parametrize(
    ("fault", "death"),
    [
        ("fail:token=7,rank=1", r"StepFailedError: a failed allocation .* \(lower --max-num-batched-tokens"),
        ("collective:token=7,rank=1", "RuntimeError: a failed collective that was asked for"),
        ("exit:token=7,rank=1", "exited with code 3 without a word"),
    ],
)
def test_a_rank_that_fails_in_a_step_says_why_and_ends(model: Path, fault: str, death: str) -> None:
    settings = settings_of(model, tp=2, fault_injection=fault)
    with a_group(2) as group, children(settings, group) as (waiting, failing):
        harness = Harness(settings, MultiProcessExecutor(group))
        harness.add([5, 7, 9])
        harness.core._take_messages(block=False)
        plan = harness.scheduler.schedule()
        assert plan is not None
        harness.executor.forward(plan)
        failing.reap()
        assert failing.died_from_inside
        assert re.match(death, failing.death())
        if fault.startswith("fail"):
            assert failing.failed is not None and failing.failed.exit_code == ExitCode.MEMORY
        assert waiting.alive
        harness.close()


def test_a_rank_that_cannot_start_says_why(model: Path) -> None:
    settings = settings_of(model, tp=2, fault_injection="crash:step=1,rank=2")
    with a_group(1) as group, children(settings, group) as (rank,):
        hear(rank)
        rank.reap()
        assert rank.failed is not None and rank.failed.exit_code == ExitCode.SETTING
        assert "'crash:step=1,rank=2' is for rank 2; --tp is 1" in rank.failed.message
        assert "parse_faults" in rank.failed.traceback
