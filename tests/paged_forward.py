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

    Each KV group has its own blocks, which lie backwards in the pool, so a kernel that takes them for
    contiguous is found out; blocks that are out of a window are filled with NaN, as if given to others.
    """
    steps = steps or (len(ids),)
    assert sum(steps) == len(ids)
    blocks = -(-len(ids) // block_size)
    pool = KVPool(model.kv_groups, blocks * len(model.kv_groups), block_size, model.dtype)
    pool.zero(torch.arange(blocks * len(model.kv_groups)))
    tables = np.arange(blocks * len(model.kv_groups), dtype=np.int32).reshape(-1, 1, blocks)[:, :, ::-1]
    out, computed = [], 0
    for count in steps:
        starts, before = np.array([0, count]), np.array([computed])
        batches = tuple(
            build_attention_batch(starts, before, table, block_size, spec.window)
            for table, spec in zip(tables, pool.specs, strict=True)
        )
        context = StepContext(torch.arange(computed, computed + count), batches, pool.layers)
        part = torch.tensor(ids[computed : computed + count])
        hidden = model.forward(model.embed(part), context)
        logits = model.head(hidden, HeadNeed.LOGITS).logits
        assert logits is not None
        out.append(logits)
        computed += count
        for table, spec in zip(tables, pool.specs, strict=True):
            lost = max(0, computed - spec.window + 1) // block_size if spec.window else 0
            for layer in spec.layers:
                for part in (pool.layers[layer].keys, pool.layers[layer].values):
                    part[torch.from_numpy(table[0, :lost].astype(np.int64))] = torch.nan
    return torch.cat(out)
