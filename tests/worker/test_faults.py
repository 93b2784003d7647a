"""Faults on purpose: that they strike when and where they are told to, and only there."""

from __future__ import annotations

import pytest

from servelite.config import SettingError, Settings
from servelite.ipc.messages import FromRank, Plan, RankDone, RankReady, RowFlag, SamplingParams
from servelite.kernels.collective import ONE_RANK, NobodyWaits
from servelite.worker import faults as faults_module
from servelite.worker.base import ModelRunner, StepFailedError
from servelite.worker.faults import Fault, FaultKind, Faults, parse_faults
from servelite.worker.simulated import SimulatedRunner, simulated_facts
from tests.worker.driver import Driver, Request


class Spy(SimulatedRunner):
    """Counts what it computes."""

    computed = 0

    def forward(self, plan: Plan) -> None:
        self.computed += 1
        super().forward(plan)


def faults_of(text: str, *, rank: int = 0, ranks: int = 1, epoch: int = 0) -> Faults:
    return Faults(parse_faults(text, ranks), rank, epoch)


def spy(faults: Faults, ranks: int = 1) -> Spy:
    settings = Settings(executor="simulated", max_num_seqs=4, num_gpu_blocks_override=64)
    group = faults.group(NobodyWaits(0, ranks) if ranks > 1 else ONE_RANK)
    return Spy(simulated_facts(settings, 1000, 256), settings.max_num_seqs, group=group)


def runner(text: str, **where: int) -> ModelRunner:
    faults = faults_of(text, **where)
    return faults.runner(spy(faults, where.get("ranks", 1)))


def requests() -> list[Request]:
    return [Request([7, 77, 8], SamplingParams(max_tokens=4)), Request([9], SamplingParams(max_tokens=4))]


def test_they_are_read() -> None:
    assert parse_faults("") == ()
    assert parse_faults("crash:token=7;hang:step=12") == (
        Fault(FaultKind.CRASH, token=7),
        Fault(FaultKind.HANG, step=12),
    )
    assert parse_faults("drop:step=3,rank=2;nan:token=5", 3) == (
        Fault(FaultKind.DROP, step=3, rank=2),
        Fault(FaultKind.NAN, token=5),
    )


@pytest.mark.parametrize(
    "text",
    ["crash", "crash:step=x", "melt:step=3", "crash:row=3", "crash:step=-1", "crash:step=1,rank=x",
     "crash:step=1,rank=0,rank=0", "crash:step=²", "crash:step=1,step=2", "crash:step=" + "9" * 5000],
)  # fmt: skip
def test_a_fault_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(SettingError, match=r"--fault-injection: .* is not one of"):
        parse_faults(text, 2)


def test_a_rank_that_is_not_there_is_refused_and_so_is_what_one_rank_has_not() -> None:
    with pytest.raises(SettingError, match="'crash:step=1,rank=2' is for rank 2; --tp is 2, from rank 0"):
        parse_faults("crash:step=1,rank=2", 2)
    for kind in ("drop", "collective"):
        with pytest.raises(SettingError, match="needs ranks that talk to each other: --tp 2"):
            parse_faults(f"{kind}:step=1")


def test_they_need_debug() -> None:
    with pytest.raises(SettingError, match="needs --debug"):
        Settings(fault_injection="crash:step=1")


def test_where_there_is_none_nothing_is_in_the_way() -> None:
    for faults in (
        faults_of(""),
        faults_of("error:step=2", epoch=1),
        faults_of("error:step=2", rank=1, ranks=2),
    ):
        plain, group, sent = spy(faults), NobodyWaits(0, 2), []
        assert faults.runner(plain) is plain
        assert faults.group(group) is group
        assert faults.sender(sent.append) == sent.append


def test_a_step_fails_in_the_first_life_only() -> None:
    with pytest.raises(RuntimeError, match="asked for"):
        Driver(runner("error:step=2")).run(requests())
    with pytest.raises(StepFailedError):
        Driver(runner("fail:step=2")).run(requests())
    Driver(runner("error:step=2", epoch=1)).run(requests())
    Driver(runner("error:step=99")).run(requests())


def test_a_prompts_token_strikes_in_every_life() -> None:
    with pytest.raises(RuntimeError, match="asked for"):
        Driver(runner("error:token=77", epoch=3)).run(requests())
    Driver(runner("error:token=78")).run(requests())


def test_an_error_comes_before_the_step_is_computed_and_a_lack_of_memory_in_it() -> None:
    for kind, computed in (("error", 2), ("fail", 3)):
        faults = faults_of(f"{kind}:step=3")
        inner = spy(faults)
        with pytest.raises(RuntimeError, match="asked for"):
            Driver(faults.runner(inner)).run(requests())
        assert inner.computed == computed


def test_it_strikes_on_the_rank_that_is_named() -> None:
    with pytest.raises(RuntimeError, match="asked for"):
        Driver(runner("error:step=2,rank=1", rank=1, ranks=2)).run(requests())
    Driver(runner("error:step=2,rank=1", rank=0, ranks=2)).run(requests())


def test_the_ranks_operation_fails() -> None:
    with pytest.raises(RuntimeError, match="a failed collective that was asked for"):
        Driver(runner("collective:step=2", ranks=2)).run(requests())
    Driver(runner("collective:step=2", rank=1, ranks=2)).run(requests())


def test_only_the_marked_row_is_not_finite_and_ranks_agree_on_it() -> None:
    for rank in (0, 1):
        marked, other = requests()
        Driver(runner("nan:token=77,rank=1", rank=rank, ranks=2)).run([marked, other])
        assert set(marked.flags) == {RowFlag.NON_FINITE} and set(other.flags) == {RowFlag.OK}


def test_at_a_step_no_row_is_finite() -> None:
    every = requests()
    Driver(runner("nan:step=2")).run(every)
    assert [request.flags for request in every] == [
        [RowFlag.OK, RowFlag.NON_FINITE, RowFlag.OK, RowFlag.OK]
    ] * 2


def test_a_step_told_late_is_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults_module.time, "sleep", slept.append)
    expected = Driver(spy(faults_of(""))).run(requests())
    assert Driver(runner("delay:step=2")).run(requests()) == expected
    assert slept == [faults_module.DELAY_S]


def test_a_dropped_message_is_the_steps_alone() -> None:
    faults = faults_of("drop:step=2,rank=1", rank=1, ranks=2)
    told: list[FromRank] = []
    send = faults.sender(told.append)
    messages: list[FromRank] = [RankReady(spy(faults).facts), *(RankDone(1, step, 0) for step in (1, 2, 3))]
    send(messages[0])
    for step, message in enumerate(messages[1:], 1):
        faults.begin(Plan(1, step, b"", b"", b"", b"", b"", b"", b""))
        send(message)
    assert told == [messages[0], messages[1], messages[3]]
