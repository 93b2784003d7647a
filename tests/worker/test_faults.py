"""Faults on purpose: that they strike when they are told to, and only then."""

from __future__ import annotations

import pytest

from servelite.config import SettingError, Settings
from servelite.ipc.messages import RowFlag, SamplingParams
from servelite.worker.base import StepFailedError
from servelite.worker.faults import Fault, FaultKind, FaultyRunner, parse_faults
from servelite.worker.simulated import SimulatedRunner, simulated_facts
from tests.worker.driver import Driver, Request


def runner(text: str, epoch: int = 0) -> FaultyRunner:
    settings = Settings(executor="simulated", max_num_seqs=4, num_gpu_blocks_override=64)
    simulated = SimulatedRunner(simulated_facts(settings, 1000, 256), settings.max_num_seqs)
    return FaultyRunner(simulated, parse_faults(text), epoch)


def requests() -> list[Request]:
    return [Request([7, 77, 8], SamplingParams(max_tokens=4)), Request([9], SamplingParams(max_tokens=4))]


def test_they_are_read() -> None:
    assert parse_faults("") == ()
    assert parse_faults("crash:token=7;hang:step=12") == (
        Fault(FaultKind.CRASH, token=7),
        Fault(FaultKind.HANG, step=12),
    )


@pytest.mark.parametrize("text", ["crash", "crash:step=x", "melt:step=3", "crash:row=3", "crash:step=-1"])
def test_a_fault_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(SettingError, match="--fault-injection"):
        parse_faults(text)


def test_they_need_debug() -> None:
    with pytest.raises(SettingError, match="needs --debug"):
        Settings(fault_injection="crash:step=1")


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


def test_only_the_marked_row_is_not_finite() -> None:
    marked, other = requests()
    Driver(runner("nan:token=77")).run([marked, other])
    assert set(marked.flags) == {RowFlag.NON_FINITE} and set(other.flags) == {RowFlag.OK}
