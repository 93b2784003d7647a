"""Every kernel in plain torch: what runs where nothing faster is there, and what the tests compare with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from servelite.kernels.attention_batch import AttentionBatch, DecodeBucket, PrefillChunk
from servelite.kernels.kv_layout import LayerCache


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] scaled to a root mean square of 1, times weight [n]."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[tokens, 2n], the gate first -> silu(gate) * up, [tokens, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, d] by its position; dimension i is paired with i + d/2.

    Args:
        cos: [tokens, 1, d], both halves alike.
        sin: [tokens, 1, d], the first half negated.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def write_kv(keys: Tensor, values: Tensor, cache: LayerCache, batch: AttentionBatch) -> None:
    """Put the step's keys and values [tokens, kv_heads, d] where the batch says; padding goes nowhere."""
    where, tokens = (batch.write_blocks, batch.write_offsets), len(batch.write_blocks)
    cache.keys.index_put_(where, keys[:tokens])
    cache.values.index_put_(where, values[:tokens])


def paged_attention(query: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of a flat mixed batch over the cache, the step's own tokens already in it.

    Args:
        query: [tokens, heads, d]; heads is a multiple of the cache's KV heads.

    Returns:
        [tokens, heads, d]; 0 for padding.
    """
    if len(query) > (tokens := len(batch.write_blocks)):
        padded = torch.zeros_like(query)
        padded[:tokens] = paged_attention(query[:tokens], cache, batch, scale)
        return padded
    out = torch.empty_like(query)
    for bucket in batch.decodes:
        if bucket.tokens is None:
            return _decode(query, cache, bucket, scale)
        out.index_copy_(0, bucket.tokens, _decode(query.index_select(0, bucket.tokens), cache, bucket, scale))
    for chunk in batch.prefills:
        out[chunk.start : chunk.stop] = _prefill(query[chunk.start : chunk.stop], cache, chunk, scale)
    return out


def _decode(query: Tensor, cache: LayerCache, bucket: DecodeBucket, scale: float) -> Tensor:
    rows, heads, dim = query.shape
    kv_heads = cache.keys.shape[2]
    keys = cache.keys.index_select(0, bucket.blocks).view(rows, -1, kv_heads, dim).transpose(1, 2)
    values = cache.values.index_select(0, bucket.blocks).view(rows, -1, kv_heads, dim).transpose(1, 2)
    # A KV head's query heads stand where query positions would: they share its keys and the mask,
    # so grouped-query attention needs no copy of the keys for each head.
    grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
    mask = bucket.mask.expand(-1, 1, grouped.shape[2], -1)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, dim)


def _prefill(query: Tensor, cache: LayerCache, chunk: PrefillChunk, scale: float) -> Tensor:
    kv_heads, dim = cache.keys.shape[2:]
    keys = cache.keys.index_select(0, chunk.blocks).view(-1, kv_heads, dim)[: chunk.context]
    values = cache.values.index_select(0, chunk.blocks).view(-1, kv_heads, dim)[: chunk.context]
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)
