"""Makes one vector of a prompt's hidden states, as they come: a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from servelite.ipc.messages import Pooling
from servelite.worker.step_inputs import PooledSpan


class Pooler:
    """One vector a row, in float64: where a prompt is cut into chunks is not to be seen in its mean.

    Derived state, like the resident table's: a row that begins anew begins with its prompt's first token,
    but for the `last` kind, which looks at none of the earlier ones.
    """

    def __init__(self, pooling: Pooling, rows: int) -> None:
        self._kind = pooling.kind
        self._vectors = torch.zeros((rows, pooling.size), dtype=torch.float64)

    def take(self, hidden: Tensor, spans: Iterable[PooledSpan]) -> dict[int, Tensor]:
        """
        Args:
            hidden: [tokens, size], after the model's last norm; of a whole step.

        Returns:
            float32 [size], by row, for the prompts that are complete.
        """
        complete = {}
        for span in spans:
            part, vector = hidden[span.tokens], self._vectors[span.row]
            if self._kind == "last":
                vector.copy_(part[-1])
            elif self._kind == "cls":
                if span.first == 0:
                    vector.copy_(part[0])
            else:
                summed = part.sum(dim=0, dtype=torch.float64)
                vector.copy_(summed if span.first == 0 else vector + summed)
            if span.last:
                count = span.first + len(part) if self._kind == "mean" else 1
                complete[span.row] = (vector / count).float()
        return complete
