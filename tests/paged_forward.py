"""A model's logits of one sequence, through the paged cache in steps of given sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from servelite.kernels.attention_batch import build_attention_batch
from servelite.kernels.kv_layout import KVPool
from servelite.layers.embedding import HeadNeed
from servelite.layers.step_context import StepContext
from servelite.models.base import CausalModel


@torch.inference_mode()
def paged_logits(
    model: CausalModel, ids: Sequence[int], steps: Sequence[int] = (), block_size: int = 16
) -> Tensor:
    """Logits float32 [len(ids), vocab], with `steps` tokens computed at a time; () is all at once.

    The blocks lie backwards in the pool, so a kernel that takes them for contiguous is found out.
    """
    steps = steps or (len(ids),)
    assert sum(steps) == len(ids)
    blocks = -(-len(ids) // block_size)
    pool = KVPool(model.kv_groups, blocks, block_size)
    pool.zero(torch.arange(blocks))
    table = np.arange(blocks, dtype=np.int32)[None, ::-1]
    out, computed = [], 0
    for count in steps:
        batch = build_attention_batch(np.array([0, count]), np.array([computed]), table, block_size)
        positions = torch.arange(computed, computed + count)
        context = StepContext(positions, (batch,) * len(model.kv_groups), pool.layers)
        part = torch.tensor(ids[computed : computed + count])
        hidden = model.forward(model.embed(part), context)
        logits = model.head(hidden, HeadNeed.LOGITS).logits
        assert logits is not None
        out.append(logits)
        computed += count
    return torch.cat(out)
