"""From a plan's columns to the tensors of one step, by array operations over all rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servelite.ipc.messages import Plan, unpack
from servelite.kernels.attention_batch import AttentionBatch, build_attention_batch
from servelite.kernels.kv_layout import KVPool
from servelite.worker.resident import ResidentTable
from servelite.worker.sampler import SamplingRows

_Ints = npt.NDArray[np.int32]
_Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PromptSpan:
    """Consecutive tokens of one row's prompt whose logprobs are wanted."""

    row: int
    first: int  # position in the prompt of the first token
    tokens: Tensor  # int64 [n]
    predicted_by: slice  # of the flat batch, [n]: each token's predecessor


@dataclass(frozen=True)
class PooledSpan:
    """The tokens that a step computes of a prompt whose vector is wanted."""

    row: int
    first: int  # position of the first
    tokens: slice  # of the flat batch
    last: bool  # the prompt ends with them


@dataclass(frozen=True)
class StepInputs:
    """What one forward pass and the sampling after it need."""

    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens], each token's place in its own sequence
    batches: tuple[AttentionBatch, ...]  # by KV group
    asked: npt.NDArray[np.int64]  # which of the plan's rows have logits
    samples: npt.NDArray[np.bool_]  # [asked]: those that sample
    last_tokens: Tensor  # int64 [sampling rows]: each one's last token in the flat batch
    prompt_spans: tuple[PromptSpan, ...]
    pooled: tuple[PooledSpan, ...]


def build_step_inputs(plan: Plan, table: ResidentTable, pool: KVPool, block_size: int) -> StepInputs:
    """`table` has taken in the plan; its `num_computed` is still that of before the step.

    A row with logits samples if the step computes all tokens that the table has of it. Of its last
    `num_logits` positions, those that predict a token of its prompt are scored, if the row wants
    its prompt's logprobs. A row that pools never samples.
    """
    rows, counts = unpack(plan.rows), unpack(plan.num_tokens).astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    computed = table.num_computed[rows]
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - computed, counts)
    token_ids = table.tokens[np.repeat(rows, counts), positions]
    used = -(-int((computed + counts).max(initial=0)) // block_size)
    batches = tuple(
        build_attention_batch(starts, computed, group[rows, :used], block_size, spec.window)
        for group, spec in zip(table.block_tables, pool.specs, strict=True)
    )
    num_logits = unpack(plan.num_logits)
    asked = np.flatnonzero(num_logits)
    complete, pools = computed + counts == table.num_known[rows], table.pools[rows]
    samples = (complete & ~pools)[asked]
    scored = asked[table.prompt_logprobs[rows[asked]] >= 0]
    bounds = starts.tolist()
    pooled = tuple(
        PooledSpan(int(rows[at]), int(computed[at]), slice(*bounds[at : at + 2]), bool(complete[at]))
        for at in np.flatnonzero(pools)
    )
    return StepInputs(
        token_ids=torch.from_numpy(token_ids.astype(np.int64)),
        positions=torch.from_numpy(positions),
        batches=batches,
        asked=asked,
        samples=samples,
        last_tokens=torch.from_numpy(starts[asked[samples] + 1] - 1),
        prompt_spans=_prompt_spans(scored, rows, starts, num_logits, table),
        pooled=pooled,
    )


def _prompt_spans(
    wanted: _Longs, rows: _Ints, starts: _Longs, num_logits: _Ints, table: ResidentTable
) -> tuple[PromptSpan, ...]:
    spans = []
    for at in wanted.tolist():
        row, stop = int(rows[at]), int(starts[at + 1])
        end = int(table.num_computed[row]) + stop - int(starts[at])
        first = end - int(num_logits[at]) + 1
        tokens = table.tokens[row, first : min(end + 1, int(table.prompt_len[row]))].astype(np.int64)
        if len(tokens):
            begin = stop - int(num_logits[at])
            span = slice(begin, begin + len(tokens))
            spans.append(PromptSpan(row, first, torch.from_numpy(tokens), span))
    return tuple(spans)


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
