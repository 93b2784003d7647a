"""Which tokens a row has and how often, for the rows that pay a penalty for them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class TokenCounts:
    """A small pool of [vocabulary] lines, one for each row that uses a penalty.

    It grows when more rows use one than ever before; a line goes back when its row is taken again.
    Derived state: `rebuild` makes a line from the tokens of a row, `add` follows what is sampled.
    """

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._line = np.full(rows, -1, np.int64)  # of each row; -1: none
        self._free: list[int] = []
        self.seen = torch.zeros((0, vocab_size), dtype=torch.bool)  # in the prompt or the output
        self.output = torch.zeros((0, vocab_size), dtype=torch.int32)  # times in the output

    def rebuild(self, row: int, prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32]) -> None:
        """Count a row's tokens anew."""
        if self._line[row] < 0:
            if not self._free:
                self._grow()
            self._line[row] = self._free.pop()
        line, vocab = int(self._line[row]), self.seen.shape[1]
        self.output[line] = torch.from_numpy(np.bincount(output, minlength=vocab))
        self.seen[line] = self.output[line] > 0
        self.seen[line, torch.from_numpy(prompt.astype(np.int64))] = True

    def drop(self, row: int) -> None:
        """The row's request uses no penalty."""
        if self._line[row] >= 0:
            self._free.append(int(self._line[row]))
            self._line[row] = -1

    def add(self, rows: npt.NDArray[np.int32], tokens: npt.NDArray[np.int64]) -> None:
        """Each of `rows` got one of `tokens`; those without a line are passed over."""
        counted = self._line[rows] >= 0
        if counted.any():
            where = (self.lines(rows[counted]), torch.from_numpy(tokens[counted]))
            self.output[where] += 1
            self.seen[where] = True

    def lines(self, rows: npt.NDArray[np.int32]) -> Tensor:
        """Where the counts of `rows` are, int64 [rows]; each must have some."""
        return torch.from_numpy(self._line[rows])

    def _grow(self) -> None:
        there = len(self.seen)
        more = min(max(1, there), len(self._line) - there)
        self._free += range(there, there + more)
        self.seen = torch.cat((self.seen, self.seen.new_zeros(more, self.seen.shape[1])))
        self.output = torch.cat((self.output, self.output.new_zeros(more, self.output.shape[1])))
