"""What a step costs the model runner, by its own account: prepare, forward, sample. No scheduler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from servelite.config import SettingError
from servelite.ipc.messages import NewRow, Plan, RunnerFacts, SamplingParams, pack
from servelite.worker.base import ModelRunner
from servelite.worker.kv_pool_size import most_blocks

_Longs = npt.NDArray[np.int64]

_PREFILL_TOKENS: Final = 512  # of one step


@dataclass(frozen=True)
class RunnerCosts:
    """Of steps in which `batch` rows decode, medians in milliseconds; and of the prefill before them."""

    batch: int
    prefill_tokens_per_s: float
    prepare_ms: float
    forward_ms: float
    sample_ms: float
    step_ms: float
    tokens_per_s: float


class _Blocks:
    """Which physical block holds which of a row's: a window's group uses a few of them in turn."""

    def __init__(self, facts: RunnerFacts, batch: int, length: int) -> None:
        """`length`: the most tokens that a row gets."""
        self.size, self.groups = facts.block_size, len(facts.kv_groups)
        self._batch = batch
        self._per_row = [
            most_blocks(length, self.size, group.window, _PREFILL_TOKENS) for group in facts.kv_groups
        ]
        self.needed = batch * sum(self._per_row)

    def of(self, rows: _Longs, before: _Longs, after: _Longs) -> list[int]:
        """The blocks numbered `before` to `after` of each row, group by group, as a plan lists them."""
        blocks, first = [], 0
        spans = list(zip(rows.tolist(), before.tolist(), after.tolist(), strict=True))
        for own in self._per_row:
            blocks += [
                first + row * own + number % own for row, start, end in spans for number in range(start, end)
            ]
            first += self._batch * own
        return blocks


class RunnerBenchmark:
    """Drives a runner with plans of its own, whose rows each have blocks of their own."""

    def __init__(self, runner: ModelRunner, sampling: SamplingParams) -> None:
        self._runner, self._sampling = runner, sampling
        self._step = 0
        self._generation = 0

    def measure(
        self, batch: int, context: int, steps: int, watch: Callable[[float], None] = lambda _: None
    ) -> RunnerCosts:
        """
        Args:
            context: tokens that each row has in the cache before its first decode.
            steps: how many decodes to time, after one that is not.
            watch: called before each step with the share of the steps that are done.

        Raises:
            SettingError: the KV pool has no room for it.
        """
        pool = _Blocks(self._runner.facts, batch, context + steps + 1)
        if pool.needed > self._runner.facts.num_blocks:
            raise SettingError(
                f"--batch {batch} at --context {context} needs {pool.needed} KV blocks, the pool holds "
                f"{self._runner.facts.num_blocks}: raise --kv-cache-memory-bytes or lower one of the two"
            )
        self._generation += 1
        chunks = list(_chunks(batch, context, _PREFILL_TOKENS))
        total = len(chunks) + steps + 1
        held: _Longs = np.zeros(batch, np.int64)  # tokens in the cache, by row
        began = time.perf_counter()
        for number, (rows, counts) in enumerate(chunks):
            watch(number / total)
            self._run(rows, counts, held, context, pool)
        prefill = batch * context / (time.perf_counter() - began)
        everyone, one = np.arange(batch), np.ones(batch, np.int64)
        seconds = []
        for number in range(steps + 1):
            watch((len(chunks) + number) / total)
            seconds.append(self._run(everyone, one, held, context, pool))
        prepare, forward, sample = (statistics.median(part) * 1e3 for part in zip(*seconds[1:], strict=True))
        step = statistics.median(sum(parts) for parts in seconds[1:]) * 1e3
        return RunnerCosts(batch, prefill, prepare, forward, sample, step, batch / step * 1e3)

    def _run(
        self, rows: _Longs, counts: _Longs, held: _Longs, context: int, pool: _Blocks
    ) -> tuple[float, ...]:
        """Run one step of `counts` tokens of `rows`; seconds of prepare, forward and sample."""
        size = pool.size
        before, after = -(-held[rows] // size), -(-(held[rows] + counts) // size)
        new = tuple(self._new_row(int(row), context) for row in rows[held[rows] == 0])
        held[rows] += counts
        plan = Plan(
            epoch=0,
            step=self._step,
            rows=pack(rows),
            generations=pack(np.full(len(rows), self._generation)),
            num_tokens=pack(counts),
            num_drafts=b"",
            num_logits=pack((held[rows] >= context).astype(np.int64)),
            block_counts=pack(np.tile(after - before, pool.groups)),
            block_ids=pack(pool.of(rows, before, after)),
            new_rows=new,
        )
        self._step += 1
        self._runner.forward(plan)
        return self._runner.sample(plan, None).seconds

    def _new_row(self, row: int, context: int) -> NewRow:
        random = np.random.default_rng(row)
        return NewRow(
            row=row,
            generation=self._generation,
            tokens=pack(random.integers(0, self._runner.facts.vocab_size, context)),
            prompt_len=context,
            num_computed=0,
            seed=row,
            choice=0,
            sampling=self._sampling,
        )


def _chunks(batch: int, context: int, budget: int) -> Iterator[tuple[_Longs, _Longs]]:
    """Rows and token counts of each prefill step: whole prompts while they fit, long ones in chunks."""
    left: list[tuple[int, int]] = []
    room = budget
    for row in range(batch):
        tokens = context
        while tokens:
            part = min(tokens, room)
            left.append((row, part))
            tokens, room = tokens - part, room - part
            if not room:
                yield _columns(left)
                left, room = [], budget
    if left:
        yield _columns(left)


def _columns(pairs: list[tuple[int, int]]) -> tuple[_Longs, _Longs]:
    rows, counts = zip(*pairs, strict=True)
    return np.array(rows), np.array(counts)
