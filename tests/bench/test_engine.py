"""The engine's parts are measured as they run: on the simulated executor, and on tiny models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from servelite.bench.engine_loop import measure_loop
from servelite.bench.engine_report import LOOP_HEAD, RUNNER_HEAD, loop_row, runner_row
from servelite.bench.engine_runner import RunnerBenchmark
from servelite.config import SettingError, Settings
from servelite.ipc.messages import KVGroup, Plan, RunnerFacts, SamplingParams, StepResult, unpack
from servelite.worker.base import ModelRunner
from servelite.worker.load import load_runner
from servelite.worker.simulated import CostModel, SimulatedRunner
from tests.tiny_models import tiny_llama, tiny_windowed_qwen2


@pytest.mark.parametrize(("batch", "context"), [(1, 1), (40, 3), (5, 2000)])
def test_the_loop(batch: int, context: int) -> None:
    shares: list[float] = []
    costs = measure_loop(batch, context, 20, 16, shares.append)
    assert costs.batch == batch and len(shares) == 20 and shares == sorted(shares)
    parts = (costs.schedule_us, costs.update_us, costs.encode_outputs_us, costs.encode_plan_us)
    assert all(0 < part < 100_000 for part in parts)
    assert len(loop_row(costs)) == len(LOOP_HEAD)


class _Recorder:
    """A runner that notes its plans."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.facts = runner, runner.facts
        self.plans: list[Plan] = []
        self.results: list[StepResult] = []

    def forward(self, plan: Plan) -> None:
        self.plans.append(plan)
        self._runner.forward(plan)

    def sample(self, plan: Plan, masks: bytes | None) -> StepResult:
        self.results.append(self._runner.sample(plan, masks))
        return self.results[-1]


def simulated(batch: int, length: int, window: int = 0, blocks: int = 4096) -> _Recorder:
    groups = (KVGroup("full", (0,), 64),) + ((KVGroup("window", (1,), 64, window),) if window else ())
    facts = RunnerFacts(blocks, 16, length, 1000, groups, "none", "none")
    runner = SimulatedRunner(facts, batch, cost=CostModel(1e-3, 0.0, 0.0), verify=True)
    return _Recorder(runner)


@pytest.mark.parametrize("window", [0, 32])
def test_plans_are_those_of_an_engine(window: int) -> None:
    """The simulated runner checks at every step that what it finds in the blocks is each row's own."""
    runner = simulated(9, 1404, window)
    benchmark = RunnerBenchmark(runner, SamplingParams(max_tokens=4, temperature=0.0))
    for batch, context in ((9, 7), (3, 1400), (1, 1)):
        first = len(runner.plans)
        costs = benchmark.measure(batch, context, 2)
        plans = runner.plans[first:]
        tokens = [int(unpack(plan.num_tokens).sum()) for plan in plans]
        assert sum(tokens[:-3]) == batch * context and max(tokens) <= 512
        assert tokens[-3:] == [batch] * 3  # one to warm up, two measured
        assert [len(unpack(r.tokens)) for r in runner.results[-3:]] == [batch] * 3
        assert costs.step_ms >= 1 and costs.tokens_per_s <= batch * 1000
    assert [plan.step for plan in runner.plans] == list(range(len(runner.plans)))


def test_a_pool_without_room_is_told() -> None:
    benchmark = RunnerBenchmark(simulated(4, 64, blocks=15), SamplingParams(max_tokens=4))
    with pytest.raises(SettingError, match="--batch 4 at --context 50 needs 16 KV blocks, the pool holds 15"):
        benchmark.measure(4, 50, 2)


@pytest.mark.parametrize("window", [0, 24])
def test_a_tiny_model(window: int, tmp_path: Path) -> None:
    if window:
        tiny_windowed_qwen2(tmp_path, window=window)
    else:
        tiny_llama(tmp_path)
    settings = Settings(max_num_seqs=8, max_model_len=70 + 5, num_gpu_blocks_override=128)
    runner = _Recorder(load_runner(settings, tmp_path))
    benchmark = RunnerBenchmark(runner, SamplingParams(max_tokens=5, temperature=0.0))
    costs = [benchmark.measure(batch, 70, 3) for batch in (8, 1)]
    for batch, cost in zip((8, 1), costs, strict=True):
        parts = (cost.prepare_ms, cost.forward_ms, cost.sample_ms)
        assert cost.batch == batch and all(part > 0 for part in parts)
        assert cost.step_ms >= max(parts) and cost.prefill_tokens_per_s > 0
        assert cost.tokens_per_s == pytest.approx(batch / cost.step_ms * 1e3)
        assert len(runner_row(cost)) == len(RUNNER_HEAD)
    # Row 0 has the same prompt alone and in a batch: so it has the same tokens.
    together, alone = runner.results[1 : 1 + 5], runner.results[-5:]
    assert [unpack(r.tokens)[0] for r in together[-4:]] == [unpack(r.tokens)[0] for r in alone[-4:]]
    assert np.all([unpack(r.flags, np.dtype("<i1")) == 0 for r in alone])
