"""The resident request table: what a worker keeps of each request, in preallocated columns by row.

A row never moves while its request runs. Everything came in a plan's `NewRow` and block columns or was
sampled here, so the table is derived state: the same on every rank, empty after a restart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from servelite.ipc.messages import NewRow, Plan, unpack
from servelite.worker.logits_processors import LogitsProcessors

_Ints = npt.NDArray[np.int32]
_Longs = npt.NDArray[np.int64]


class ResidentTable:
    """Columns by row. Arrays are touched lazily: a long maximum costs address space, not memory."""

    def __init__(self, rows: int, max_model_len: int, block_size: int, groups: int, vocab_size: int) -> None:
        self._block_size = block_size
        self.tokens = np.zeros((rows, max_model_len), np.int32)  # prompt, then output
        self.generation = np.full(rows, -1, np.int32)
        self.num_known = np.zeros(rows, np.int64)  # tokens in `tokens`
        self.num_computed = np.zeros(rows, np.int64)  # those whose keys and values are in the cache
        self.prompt_len = np.zeros(rows, np.int64)
        self.block_tables = np.zeros((groups, rows, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros((groups, rows), np.int64)
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seed = np.zeros(rows, np.int64)  # the bits of an unsigned one
        self.choice = np.zeros(rows, np.int64)
        self.logprobs = np.full(rows, -1, np.int64)  # alternatives a token; -1: none are wanted
        self.prompt_logprobs = np.full(rows, -1, np.int64)
        self.pools = np.zeros(rows, np.bool_)  # it ends with its prompt, and a vector
        self.processors = LogitsProcessors(rows, vocab_size)

    def apply(self, plan: Plan) -> _Longs:
        """Take in a plan's new rows and blocks.

        Returns:
            The blocks, int64 [n], that nothing has been computed into: their old content is void.
        """
        for new in plan.new_rows:
            self._occupy(new)
        rows = unpack(plan.rows)
        counts = unpack(plan.block_counts).reshape(len(self.block_tables), len(rows))
        blocks = unpack(plan.block_ids)
        if not len(blocks):
            return blocks.astype(np.int64)
        flat = counts.reshape(-1)
        places = np.repeat(np.arange(flat.size), flat)  # of each block: its (group, row of the plan)
        group, row = places // len(rows), rows[places % len(rows)]
        within = np.arange(len(blocks)) - np.repeat(np.cumsum(flat) - flat, flat)
        column = self.num_blocks[group, row] + within
        self.block_tables[group, row, column] = blocks
        self.num_blocks[:, rows] += counts
        return blocks[column * self._block_size >= self.num_computed[row]].astype(np.int64)

    def _occupy(self, new: NewRow) -> None:
        row, tokens, sampling = new.row, unpack(new.tokens), new.sampling
        self.tokens[row, : len(tokens)] = tokens
        self.generation[row] = new.generation
        self.num_known[row] = len(tokens)
        self.num_computed[row] = new.num_computed
        self.prompt_len[row] = new.prompt_len
        self.num_blocks[:, row] = 0
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = np.uint64(new.seed).astype(np.int64)
        self.choice[row] = new.choice
        self.logprobs[row] = sampling.logprobs
        self.prompt_logprobs[row] = sampling.prompt_logprobs
        self.pools[row] = new.pools
        self.processors.occupy(row, sampling, tokens, new.prompt_len)

    def append(self, rows: _Ints, tokens: _Longs) -> None:
        """Each of `rows`, all of whose tokens are computed, got one of `tokens`."""
        self.tokens[rows, self.num_known[rows]] = tokens
        self.num_known[rows] += 1
        self.processors.add(rows, tokens)
