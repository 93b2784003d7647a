"""Runs steps on a real model: the resident table takes the plan in, the model computes, the sampler draws."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servelite.config import Settings
from servelite.ipc.masks import unpack_masks
from servelite.ipc.messages import (
    FLAG,
    KVGroup,
    Plan,
    Pooling,
    RowFlag,
    RunnerFacts,
    StepResult,
    TokenLogprobs,
    pack,
    unpack,
)
from servelite.kernels.attention_batch import AttentionBatch, build_attention_batch
from servelite.kernels.collective import ONE_RANK, Collective
from servelite.kernels.dispatch import choose_kernels
from servelite.kernels.kv_layout import KVPool
from servelite.layers.embedding import HeadNeed
from servelite.layers.step_context import StepContext
from servelite.loader.model import load_model
from servelite.models.base import Model
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.pooling import read_pooling
from servelite.worker.base import StepFailedError, StepGapError
from servelite.worker.device import CPUDevice, Device, StepBuffers
from servelite.worker.kv_pool_size import available_memory, size_pool, size_without_memory
from servelite.worker.logprobs import prompt_logprobs, sampled_logprobs, score_tokens
from servelite.worker.pooler import Pooler
from servelite.worker.resident import ResidentTable
from servelite.worker.sampler import apply_masks, sample
from servelite.worker.step_inputs import PromptSpan, StepInputs, build_step_inputs, sampling_rows

_log = logging.getLogger(__name__)

# On a CPU a checkpoint in bfloat16 is widened, unless asked not to: bfloat16 saves bytes, but computes at
# half of float32's rate.
_DTYPES: Final = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


@contextmanager
def _memory_may_run_out() -> Iterator[None]:
    """Turn a failed allocation into the step's failure: the next step may be smaller."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own has no type of its own on the CPU
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise StepFailedError(f"no memory for a step's intermediates: {error}") from error
        raise


class CPUModelRunner:
    """A `worker.base.ModelRunner` on the CPU. One thread calls it."""

    def __init__(
        self, model: Model, facts: RunnerFacts, max_num_seqs: int, device: Device | None = None
    ) -> None:
        """`device`: None for plain calls on the CPU."""
        self.facts = facts
        self._model = model
        self._pool = KVPool(model.kv_groups, facts.num_blocks, facts.block_size, model.dtype)
        self._table = ResidentTable(
            max_num_seqs, facts.max_model_len, facts.block_size, len(model.kv_groups), model.vocab_size
        )
        self._pooler = None if facts.pooling is None else Pooler(facts.pooling, max_num_seqs)
        self._compute = (device or CPUDevice()).record(self._forward)
        self._beat: Callable[[], None] = lambda: None
        self._last_step: int | None = None
        self._inputs: StepInputs | None = None
        self._hidden = torch.empty(0)  # [tokens, hidden_size] of the step between forward and sample
        self._seconds = (0.0, 0.0)  # prepare, forward

    @classmethod
    def load(cls, settings: Settings, model_path: Path, group: Collective = ONE_RANK) -> CPUModelRunner:
        """Load the model, size the KV pool, warm the kernels.

        Args:
            group: the ranks that share the model, each of which calls this; they get equal facts, but for
                the ledger.

        Raises:
            ModelFileError: the model's files cannot be used.
            SettingError: a request of the length asked for would not fit, or the model cannot be divided by
                so many ranks.
        """
        clock = _Ledger()
        files = open_model_files(model_path)
        clock.mark("open model")
        model = load_model(files, choose_kernels("cpu"), _DTYPES[settings.dtype], group)
        group.barrier()  # before memory is looked at: now all have taken what their weights need
        clock.mark("load weights")
        block_bytes = model.kv_groups[0].block_bytes(settings.block_size, model.dtype)  # equal in all groups
        windows = tuple(spec.window for spec in model.kv_groups)
        weights = sum(slot.tensor.nbytes for slot in model.weights())
        least, most = _range_over_ranks(group, available_memory(), weights)
        encoder = model.task == "embed"
        if encoder:
            size = size_without_memory(settings, files.max_model_len)
        else:
            size = size_pool(settings, files.max_model_len, block_bytes, least[0], windows, most[1], group)
        _warm_up(model, settings.block_size)
        clock.mark("warm up")
        facts = RunnerFacts(
            num_blocks=size.num_blocks,
            block_size=settings.block_size,
            max_model_len=size.max_model_len,
            vocab_size=model.vocab_size,
            kv_groups=tuple(
                KVGroup(spec.kind, spec.layers, block_bytes, spec.window) for spec in model.kv_groups
            ),
            dtype=str(model.dtype).removeprefix("torch."),
            device="cpu",
            ledger=clock.phases(),
            features=() if encoder else ("logprobs",),
            pooling=Pooling(*read_pooling(model_path, settings.pooling, encoder=encoder), model.hidden_size),
            encoder=encoder,
        )
        if group.rank == 0:
            each = f" in each of {group.size} ranks" if group.size > 1 else ""
            memory = size.num_blocks * block_bytes / 2**30
            blocks = f"{size.num_blocks} KV blocks of {settings.block_size} tokens ({memory:.2f} GiB)"
            _log.info(
                "model: %s in %s, %s, %d threads%s",
                files.architecture, facts.dtype, "no KV cache" if encoder else blocks,
                torch.get_num_threads(), each,
            )  # fmt: skip
        return cls(model, facts, settings.max_num_seqs)

    def watch(self, beat: Callable[[], None]) -> None:
        """See `ModelRunner.watch`: once a layer."""
        self._beat = beat

    @torch.inference_mode()
    @_memory_may_run_out()
    def forward(self, plan: Plan) -> None:
        """Compute the plan's tokens and keep the hidden states for `sample`.

        Raises:
            StepGapError: the step does not follow the last one, or a row's generation is not the
                resident one.
            StepFailedError: there was no memory for it.
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
        inputs = build_step_inputs(plan, self._table, self._pool, self.facts.block_size)
        prepared = time.perf_counter()
        self._hidden = self._compute(inputs.token_ids, inputs.positions, inputs.batches)
        self._inputs = inputs
        self._table.num_computed[unpack(plan.rows)] += unpack(plan.num_tokens)
        self._seconds = (prepared - began, time.perf_counter() - prepared)

    def _forward(self, buffers: StepBuffers, batches: tuple[AttentionBatch, ...]) -> Tensor:
        context = StepContext(buffers.positions, batches, self._pool.layers, self._beat)
        return self._model.forward(self._model.embed(buffers.token_ids), context)

    @torch.inference_mode()
    @_memory_may_run_out()
    def sample(self, plan: Plan, masks: bytes | None) -> StepResult:
        """Draw for the rows of the step just computed; see `ModelRunner.sample`.

        Raises:
            StepFailedError: there was no memory for it.
        """
        began = time.perf_counter()
        assert self._inputs is not None, "sample before forward"
        inputs, self._inputs = self._inputs, None
        asked, samples = unpack(plan.rows)[inputs.asked], inputs.samples
        tokens, flags = np.empty(0, np.int64), np.zeros(len(asked), np.int8)
        logprobs: dict[int, TokenLogprobs] = {}
        if samples.any():
            rows = asked[samples]
            tokens, finite, logprobs = self._draw(rows, inputs.last_tokens, masks)
            self._table.append(rows, tokens)
            flags[samples] = np.where(finite, RowFlag.OK, RowFlag.NON_FINITE)
        vectors = self._pooler.take(self._hidden, inputs.pooled) if self._pooler else {}
        for row, vector in vectors.items():
            flags[asked == row] = RowFlag.OK if vector.isfinite().all() else RowFlag.NON_FINITE
        packed = pack(tokens)
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            rows=pack(asked),
            generations=pack(unpack(plan.generations)[inputs.asked]),
            counts=pack(samples),
            tokens=packed,
            flags=pack(flags, FLAG),
            logprobs=logprobs,
            prompt_logprobs=dict(self._score_prompts(inputs.prompt_spans)),
            seconds=(*self._seconds, time.perf_counter() - began),
            checksum=zlib.crc32(packed),
            vectors={row: vector.numpy().tobytes() for row, vector in vectors.items()},
        )

    def _draw(
        self, rows: npt.NDArray[np.int32], last_tokens: Tensor, masks: bytes | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], dict[int, TokenLogprobs]]:
        """Tokens of `rows`, whether the model's logits were finite, and the logprobs asked for.

        Only the model's own logits count as not finite: masks and penalties may leave nothing.
        """
        table, processors = self._table, self._table.processors
        hidden = self._hidden.index_select(0, last_tokens)
        scored = np.flatnonzero(table.logprobs[rows] >= 0)
        assert self._model.task == "generate", "an encoder's rows pool"
        plain = masks is None and not table.temperature[rows].any() and not processors.used_by(rows)
        if plain and not len(scored):
            head = self._model.head(hidden, HeadNeed.ARG_MAX)
            assert head.best is not None
            return head.best.numpy(), head.finite.numpy(), {}
        logits, finite = self._logits(hidden)
        scored = scored[finite.numpy()[scored]]
        raw = logits[torch.from_numpy(scored)]  # a copy: the passes work in place
        if processors.used_by(rows):
            processors.apply(logits, rows, table.tokens, table.num_known[rows], table.prompt_len[rows])
        if masks is not None:
            masked, bits = unpack_masks(masks)
            if len(masked):
                apply_masks(logits, torch.from_numpy(np.flatnonzero(np.isin(rows, masked))), bits)
        tokens = sample(logits, sampling_rows(table, rows))
        logprobs: dict[int, TokenLogprobs] = {}
        if len(scored):
            part = rows[scored]
            k = np.minimum(table.logprobs[part], self._model.vocab_size)
            scores = score_tokens(raw, tokens[torch.from_numpy(scored)], k)
            index = table.num_known[part] - table.prompt_len[part]
            logprobs = dict(sampled_logprobs(scores, part, index, k))
        return tokens.numpy(), finite.numpy(), logprobs

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        assert self._model.task == "generate", "an encoder's rows pool"
        head = self._model.head(hidden, HeadNeed.LOGITS)
        assert head.logits is not None
        return head.logits, head.finite

    def _score_prompts(self, spans: tuple[PromptSpan, ...]) -> Iterator[tuple[int, TokenLogprobs]]:
        for span in spans:
            k = min(int(self._table.prompt_logprobs[span.row]), self._model.vocab_size)
            hidden = self._hidden[span.predicted_by]
            scores = prompt_logprobs(self._logits, hidden, span.tokens, span.first, k)
            if scores is not None:
                yield span.row, scores

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


def _range_over_ranks(group: Collective, *numbers: int) -> tuple[list[int], list[int]]:
    """The least and the most that any rank has of each number, the same on all."""
    mine = torch.tensor([numbers], dtype=torch.int64)
    everyone = group.all_gather(mine.view(torch.int32)).view(torch.int64).view(group.size, len(numbers))
    return everyone.amin(dim=0).tolist(), everyone.amax(dim=0).tolist()


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
def _warm_up(model: Model, block_size: int) -> None:
    """One small step through every kernel (a decode, a fresh chunk, a later chunk), its result dropped."""
    pool = KVPool(model.kv_groups, 3, block_size, model.dtype)
    pool.zero(torch.arange(3))
    starts = np.array([0, 1, 1 + block_size, 1 + 2 * block_size])
    tables = np.array([[0, 0], [1, 1], [2, 2]], np.int32)
    computed = np.array([0, 0, block_size])
    batches = tuple(
        build_attention_batch(starts, computed, tables, block_size, spec.window) for spec in pool.specs
    )
    zeros = torch.zeros(int(starts[-1]), dtype=torch.int64)
    context = StepContext(zeros, batches, pool.layers)
    hidden = model.forward(model.embed(zeros), context)
    if model.task == "generate":
        model.head(hidden[-1:], HeadNeed.LOGITS)
