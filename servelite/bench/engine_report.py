"""The tables of `servelite bench engine`."""

from __future__ import annotations

from collections.abc import Sequence

from servelite.bench.engine_loop import LoopCosts
from servelite.bench.engine_runner import RunnerCosts

LOOP_HEAD = f"{'batch':>6}{'schedule':>10}{'update':>10}{'encode':>10}{'sum':>10}{'plan':>10}"
RUNNER_HEAD = (
    f"{'batch':>6}{'prepare':>10}{'forward':>10}{'sample':>10}{'step':>10}{'tokens/s':>11}{'prefill/s':>11}"
)


def loop_row(costs: LoopCosts) -> str:
    """One line of the loop's table, in microseconds."""
    parts = (costs.schedule_us, costs.update_us, costs.encode_outputs_us)
    return f"{costs.batch:>6}" + _cells((*parts, sum(parts), costs.encode_plan_us), 1)


def runner_row(costs: RunnerCosts) -> str:
    """One line of the runner's table, in milliseconds; then tokens a second, decoding and prefilling."""
    parts = (costs.prepare_ms, costs.forward_ms, costs.sample_ms, costs.step_ms)
    rates = f"{costs.tokens_per_s:>11.1f}{costs.prefill_tokens_per_s:>11.1f}"
    return f"{costs.batch:>6}" + _cells(parts, 2) + rates


def _cells(values: Sequence[float], digits: int) -> str:
    return "".join(f"{value:>10.{digits}f}" for value in values)
