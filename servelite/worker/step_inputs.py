"""From a plan's columns to the tensors of one step, by array operations over all rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servelite.ipc.messages import Plan, unpack
from servelite.kernels.attention_batch import build_attention_batch
from servelite.kernels.kv_layout import LayerCache
from servelite.layers.step_context import StepContext
from servelite.worker.resident import ResidentTable
from servelite.worker.sampler import SamplingRows


@dataclass(frozen=True)
class StepInputs:
    """What one forward pass and the sampling after it need."""

    token_ids: Tensor  # int64 [tokens]
    context: StepContext
    logit_tokens: Tensor  # int64 [sampled]: whose hidden states the head gets, in the flat batch
    sampled: npt.NDArray[np.int64]  # [sampled]: which of the plan's rows these are


def build_step_inputs(
    plan: Plan, table: ResidentTable, caches: tuple[LayerCache, ...], block_size: int
) -> StepInputs:
    """`table` has taken in the plan; its `num_computed` is still that of before the step."""
    rows, counts = unpack(plan.rows), unpack(plan.num_tokens).astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    computed = table.num_computed[rows]
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - computed, counts)
    token_ids = table.tokens[np.repeat(rows, counts), positions]
    used = -(-int((computed + counts).max(initial=0)) // block_size)
    batches = tuple(
        build_attention_batch(starts, computed, group[rows, :used], block_size)
        for group in table.block_tables
    )
    sampled = np.flatnonzero(unpack(plan.num_logits))
    return StepInputs(
        token_ids=torch.from_numpy(token_ids.astype(np.int64)),
        context=StepContext(torch.from_numpy(positions), batches, caches),
        logit_tokens=torch.from_numpy(starts[sampled + 1] - 1),
        sampled=sampled,
    )


def sampling_rows(table: ResidentTable, rows: npt.NDArray[np.int32]) -> SamplingRows:
    """The sampling parameters of `rows`; `table` has counted the step's tokens as computed."""
    return SamplingRows(
        temperature=torch.from_numpy(table.temperature[rows]),
        top_k=torch.from_numpy(table.top_k[rows]),
        top_p=torch.from_numpy(table.top_p[rows]),
        min_p=torch.from_numpy(table.min_p[rows]),
        seed=torch.from_numpy(table.seed[rows]),
        choice=torch.from_numpy(table.choice[rows]),
        position=torch.from_numpy(table.num_computed[rows] - table.prompt_len[rows]),
    )
