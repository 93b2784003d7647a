"""Calls of the native CPU kernels, a plain C interface (csrc/cpu/abi.h) loaded with ctypes.

torch is imported first: the libraries' OpenMP is then the one that torch brought, with its threads.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from servelite.kernels.attention_batch import AttentionBatch
from servelite.kernels.cpu.isa import library_path
from servelite.kernels.kv_layout import LayerCache

_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}


class _Batch(ctypes.Structure):
    _fields_ = (
        ("starts", c_void_p), ("computed", c_void_p), ("tables", c_void_p), ("table_stride", c_int64),
        ("rows", c_int64), ("block_size", c_int64), ("window", c_int64),
    )  # fmt: skip


class _Cache(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p), ("values", c_void_p), ("block_stride", c_int64), ("position_stride", c_int64),
        ("head_stride", c_int64), ("kv_heads", c_int64), ("head_dim", c_int64), ("dtype", c_int32),
    )  # fmt: skip


class _States(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64), ("heads", c_int64),
        ("dtype", c_int32),
    )  # fmt: skip


class NativeKernels:
    """One instruction set's build of the kernels; `kernels/reference.py` says what each computes.

    A position's result is the same bits whatever else is in the batch, in whatever chunk it comes, on
    however many threads, wherever its blocks are.
    """

    def __init__(self, isa: str) -> None:
        """
        Raises:
            OSError: the library is not there, or cannot be loaded.
        """
        path = library_path(isa)
        if path is None:
            raise OSError(f"no native kernels were built for {isa}")
        self.isa = isa
        library = ctypes.CDLL(str(path))
        states = POINTER(_States)
        self._attend = library.servelite_attend
        self._attend.restype = c_int
        self._attend.argtypes = (POINTER(_Batch), POINTER(_Cache), states, states, c_float, c_int)
        self._write_kv = library.servelite_write_kv
        self._write_kv.restype = None
        self._write_kv.argtypes = (POINTER(_Batch), POINTER(_Cache), states, states)
        # By the objects that they describe, which own the memory that they point to.
        self._batches: WeakKeyDictionary[AttentionBatch, Any] = WeakKeyDictionary()
        self._caches: WeakKeyDictionary[LayerCache, Any] = WeakKeyDictionary()

    def write_kv(self, keys: Tensor, values: Tensor, cache: LayerCache, batch: AttentionBatch) -> None:
        self._write_kv(self._batch(batch), self._cache(cache), byref(_states(keys)), byref(_states(values)))

    def paged_attention(
        self, query: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float
    ) -> Tensor:
        """
        Raises:
            MemoryError: there was no room for the intermediates.
        """
        out = torch.empty(query.shape, dtype=query.dtype)
        out[batch.tokens :] = 0
        failed = self._attend(
            self._batch(batch),
            self._cache(cache),
            byref(_states(query)),
            byref(_states(out)),
            scale,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for attention's intermediates")
        return out

    def _batch(self, batch: AttentionBatch) -> Any:
        made = self._batches.get(batch)
        if made is None:
            made = _Batch(
                starts=batch.starts.ctypes.data,
                computed=batch.computed.ctypes.data,
                tables=batch.tables.ctypes.data,
                table_stride=batch.tables.shape[1],
                rows=len(batch.computed),
                block_size=batch.block_size,
                window=batch.window,
            )
            self._batches[batch] = made = ctypes.pointer(made)
        return made

    def _cache(self, cache: LayerCache) -> Any:
        made = self._caches.get(cache)
        if made is None:
            keys, values = cache.keys, cache.values
            assert keys.stride() == values.stride() and keys.stride(3) == 1
            made = _Cache(
                keys=keys.data_ptr(),
                values=values.data_ptr(),
                block_stride=keys.stride(0),
                position_stride=keys.stride(1),
                head_stride=keys.stride(2),
                kv_heads=keys.shape[2],
                head_dim=keys.shape[3],
                dtype=_DTYPES[keys.dtype],
            )
            self._caches[cache] = made = ctypes.pointer(made)
        return made


def _states(tensor: Tensor) -> _States:
    """`tensor` [tokens, heads, d] as the library sees it; it must outlive the call."""
    token, head, value = tensor.stride()
    assert value == 1
    return _States(tensor.data_ptr(), token, head, tensor.shape[1], _DTYPES[tensor.dtype])
