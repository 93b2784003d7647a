"""Every kernel in plain torch: what runs where nothing faster is there, and what the tests compare with."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from servelite.kernels.attention_batch import AttentionBatch, DecodeBucket, PrefillChunk
from servelite.kernels.kv_layout import LayerCache


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] scaled to a root mean square of 1, times weight [n], float32; in float32, as x's type."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[tokens, 2n], the gate first -> silu(gate) * up, [tokens, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """[tokens, 2n], the gate first -> gelu(gate) * up, [tokens, n]; gelu by its tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, d] by its position; dimension i is paired with i + d/2.

    Args:
        cos: float32 [tokens, 1, d], both halves alike.
        sin: float32 [tokens, 1, d], the first half negated.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def write_kv(keys: Tensor, values: Tensor, cache: LayerCache, batch: AttentionBatch) -> None:
    """Put the step's keys and values [tokens, kv_heads, d] where the batch says; padding goes nowhere."""
    dtype = cache.keys.dtype
    cache.keys.index_put_(batch.write_to, keys[: batch.tokens].to(dtype))
    cache.values.index_put_(batch.write_to, values[: batch.tokens].to(dtype))


def paged_attention(query: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of a flat mixed batch over the cache, the step's own tokens already in it.

    Args:
        query: [tokens, heads, d]; heads is a multiple of the cache's KV heads.

    Returns:
        [tokens, heads, d]; 0 for padding.
    """
    if len(query) > (tokens := batch.tokens):
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
    keys, values = (
        part.index_select(0, bucket.blocks).to(query.dtype).view(rows, -1, kv_heads, dim).transpose(1, 2)
        for part in (cache.keys, cache.values)
    )
    # A KV head's query heads stand where query positions would: they share its keys and the mask,
    # so grouped-query attention needs no copy of the keys for each head.
    grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
    mask = bucket.mask.to(query.dtype).expand(-1, 1, grouped.shape[2], -1)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, dim)


def _prefill(query: Tensor, cache: LayerCache, chunk: PrefillChunk, scale: float) -> Tensor:
    kv_heads, dim = cache.keys.shape[2:]
    keys, values = (
        part.index_select(0, chunk.blocks).to(query.dtype).view(-1, kv_heads, dim)[: chunk.context]
        for part in (cache.keys, cache.values)
    )
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=None if chunk.mask is None else chunk.mask.to(query.dtype),
        is_causal=chunk.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)


def full_attention(query: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Each row's tokens attend to all of that row's, which are all in the step: nothing is in the cache.

    Args:
        query, key, value: [tokens, heads, d].

    Returns:
        [tokens, heads, d]; 0 for padding.
    """
    out = torch.zeros_like(query)
    for start, stop in itertools.pairwise(batch.starts.tolist()):
        q, k, v = (part[start:stop].transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, scale=scale)
        out[start:stop] = attended.squeeze(0).transpose(0, 1)
    return out
