"""Runs steps on a real model: the resident table takes the plan in, the model computes, the sampler draws."""

from __future__ import annotations

import logging
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from servelite.config import Settings
from servelite.ipc.messages import FLAG, TOKEN, KVGroup, Plan, RowFlag, StepResult, pack, unpack
from servelite.kernels.attention_batch import build_attention_batch
from servelite.kernels.dispatch import choose_kernels
from servelite.kernels.kv_layout import KVPool
from servelite.layers.embedding import HeadNeed
from servelite.layers.step_context import StepContext
from servelite.loader.model import load_model
from servelite.models.base import CausalModel
from servelite.tokenizer.model_files import open_model_files
from servelite.worker.base import RunnerFacts, StepGapError
from servelite.worker.kv_pool_size import available_memory, size_pool
from servelite.worker.resident import ResidentTable
from servelite.worker.sampler import Drawn, sample
from servelite.worker.step_inputs import StepInputs, build_step_inputs, sampling_rows

_log = logging.getLogger(__name__)


class CPUModelRunner:
    """A `worker.base.ModelRunner` in float32 on the CPU. One thread calls it."""

    def __init__(self, model: CausalModel, facts: RunnerFacts, max_num_seqs: int) -> None:
        self.facts = facts
        self._model = model
        self._pool = KVPool(model.kv_groups, facts.num_blocks, facts.block_size)
        self._table = ResidentTable(max_num_seqs, facts.max_model_len, facts.block_size, len(model.kv_groups))
        self._last_step: int | None = None
        self._inputs: StepInputs | None = None
        self._hidden = torch.empty(0)  # [sampled, hidden_size] of the step between forward and sample
        self._seconds = (0.0, 0.0)  # prepare, forward

    @classmethod
    def load(cls, settings: Settings, model_path: Path) -> CPUModelRunner:
        """Load the model, size the KV pool, warm the kernels.

        Raises:
            ModelFileError: the model's files cannot be used.
            SettingError: a request of the length asked for would not fit.
        """
        clock = _Ledger()
        files = open_model_files(model_path)
        clock.mark("open model")
        model = load_model(files, choose_kernels("cpu"))
        clock.mark("load weights")
        block_bytes = sum(spec.block_bytes(settings.block_size) for spec in model.kv_groups)
        size = size_pool(settings, files.max_model_len, block_bytes, available_memory())
        _warm_up(model, settings.block_size)
        clock.mark("warm up")
        facts = RunnerFacts(
            num_blocks=size.num_blocks,
            block_size=settings.block_size,
            max_model_len=size.max_model_len,
            vocab_size=model.vocab_size,
            kv_groups=tuple(
                KVGroup(spec.kind, spec.layers, spec.block_bytes(settings.block_size), spec.window)
                for spec in model.kv_groups
            ),
            dtype="float32",
            device="cpu",
            ledger=clock.phases(),
        )
        _log.info(
            "model: %s, %d KV blocks of %d tokens (%.2f GiB), %d threads",
            files.architecture, size.num_blocks, settings.block_size,
            size.num_blocks * block_bytes / 2**30, torch.get_num_threads(),
        )  # fmt: skip
        return cls(model, facts, settings.max_num_seqs)

    @torch.inference_mode()
    def forward(self, plan: Plan) -> None:
        """Compute the plan's tokens; the hidden states that need logits are kept for `sample`.

        Raises:
            StepGapError: the step does not follow the last one, or a row's generation is not the
                resident one.
        """
        began = time.perf_counter()
        self._check_order(plan)
        stale = self._table.apply(plan)
        self._check_generations(plan)
        if len(stale):
            self._pool.zero(torch.from_numpy(stale))
        if plan.copies:
            pairs = torch.from_numpy(unpack(plan.copies).astype(np.int64)).view(-1, 2)
            self._pool.copy(pairs[:, 0], pairs[:, 1])
        inputs = build_step_inputs(plan, self._table, self._pool.layers, self.facts.block_size)
        prepared = time.perf_counter()
        hidden = self._model.forward(self._model.embed(inputs.token_ids), inputs.context)
        self._hidden = hidden.index_select(0, inputs.logit_tokens)
        self._inputs = inputs
        self._table.num_computed[unpack(plan.rows)] += unpack(plan.num_tokens)
        self._seconds = (prepared - began, time.perf_counter() - prepared)

    @torch.inference_mode()
    def sample(self, plan: Plan, masks: bytes | None) -> StepResult:
        """Draw for the rows of the step just computed; see `ModelRunner.sample`."""
        began = time.perf_counter()
        assert self._inputs is not None, "sample before forward"
        sampled, self._inputs = self._inputs.sampled, None
        rows, generations = unpack(plan.rows)[sampled], unpack(plan.generations)[sampled]
        tokens, flags = b"", b""
        if len(rows):
            drawn = self._draw(rows, masks)
            values = drawn.tokens.numpy()
            self._table.tokens[rows, self._table.num_computed[rows]] = values
            tokens = pack(values)
            flags = pack(np.where(drawn.finite.numpy(), RowFlag.OK, RowFlag.NON_FINITE), FLAG)
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            rows=pack(rows),
            generations=pack(generations),
            counts=pack(np.ones(len(rows), TOKEN)),
            tokens=tokens,
            flags=flags,
            seconds=(*self._seconds, time.perf_counter() - began),
            checksum=zlib.crc32(tokens),
        )

    def _draw(self, rows: np.ndarray, masks: bytes | None) -> Drawn:
        if masks is None and not self._table.temperature[rows].any():
            head = self._model.head(self._hidden, HeadNeed.ARG_MAX)
            assert head.best is not None
            return Drawn(head.best, head.finite)
        head = self._model.head(self._hidden, HeadNeed.LOGITS)
        assert head.logits is not None
        bits: Tensor | None = None
        if masks is not None:
            bits = torch.from_numpy(np.frombuffer(masks, np.uint8).reshape(len(rows), -1).copy())
        drawn = sample(head.logits, sampling_rows(self._table, rows), bits)
        return Drawn(drawn.tokens, drawn.finite & head.finite)

    def _check_order(self, plan: Plan) -> None:
        if self._last_step is not None and plan.step != self._last_step + 1:
            raise StepGapError(f"step {plan.step} does not follow step {self._last_step}")
        self._last_step = plan.step

    def _check_generations(self, plan: Plan) -> None:
        rows, generations = unpack(plan.rows), unpack(plan.generations)
        wrong = np.flatnonzero(self._table.generation[rows] != generations)
        if len(wrong):
            row = int(rows[wrong[0]])
            raise StepGapError(
                f"row {row} holds generation {self._table.generation[row]}, "
                f"step {plan.step} wants {generations[wrong[0]]}"
            )


class _Ledger:
    """Times the phases of a start."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._phases: list[tuple[str, float]] = []

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self._phases.append((phase, now - self._last))
        self._last = now

    def phases(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._phases)


@torch.inference_mode()
def _warm_up(model: CausalModel, block_size: int) -> None:
    """One small step through every kernel (a decode, a fresh chunk, a later chunk), its result dropped."""
    pool = KVPool(model.kv_groups, 3, block_size)
    pool.zero(torch.arange(3))
    starts = np.array([0, 1, 1 + block_size, 1 + 2 * block_size])
    tables = np.array([[0, 0], [1, 1], [2, 2]], np.int32)
    batch = build_attention_batch(starts, np.array([0, 0, block_size]), tables, block_size)
    zeros = torch.zeros(int(starts[-1]), dtype=torch.int64)
    context = StepContext(zeros, (batch,) * len(model.kv_groups), pool.layers)
    model.head(model.forward(model.embed(zeros), context)[-1:], HeadNeed.LOGITS)
