"""The collective of ranks on one machine: native, through shared memory (csrc/cpu/collective.cpp).

Usable without torch, which the simulated runner's ranks do not load: `barrier` needs none.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from ctypes import POINTER, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Final

from servelite.ipc.process import usable_cpus
from servelite.kernels.cpu.isa import library_path

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SPIN_NS: Final = 50_000
"""How long a rank spins before it sleeps: the others of a step come within this time, or much later."""
_RANKS_DIFFER: Final = 2


class _Group(ctypes.Structure):
    _fields_ = (("memory", c_void_p), ("rank", c_int32), ("size", c_int32), ("spin_ns", c_int64))


@functools.cache
def load_library() -> ctypes.CDLL:
    """The native library.

    Raises:
        OSError: it was not built, or cannot be loaded.
    """
    path = library_path("collective")
    if path is None:
        raise OSError("it was not built: no C++ compiler at install")
    library = ctypes.CDLL(str(path))  # its calls let go of Python's lock
    library.servelite_collective_bytes.restype = c_int64
    library.servelite_collective_bytes.argtypes = (c_int32,)
    group = POINTER(_Group)
    library.servelite_all_reduce.argtypes = (group, c_void_p, c_int64, c_int32)
    library.servelite_all_gather.argtypes = (group, c_void_p, c_void_p, c_int64, c_int64)
    library.servelite_barrier.argtypes = (group,)
    return library


@functools.cache
def _dtype_codes() -> dict[torch.dtype, int]:
    import torch

    return {torch.float32: 0, torch.bfloat16: 1}


class SharedMemoryCollective:
    """See `kernels.collective.Collective`. A rank may be a process, or a thread with an object of its own.

    A rank that waits spins for `SPIN_NS` (not at all where ranks outnumber the CPUs), then sleeps in the
    kernel; it waits for ever for one that is gone.
    """

    def __init__(self, fd: int, rank: int, size: int) -> None:
        """
        Args:
            fd: a memfd, empty or of this group; every rank gives it the same size. It may be closed after.

        Raises:
            OSError: the library cannot be had, or the memory cannot.
            ValueError: there is no such rank, or the memory is another group's.
        """
        library = load_library()
        length: int = library.servelite_collective_bytes(size)
        if not length or not 0 <= rank < size:
            raise ValueError(f"no rank {rank} of {size}: the native collective has 1 to 64 ranks")
        if os.fstat(fd).st_size not in (0, length):
            raise ValueError(f"descriptor {fd} holds no memory of a group of {size} ranks")
        os.ftruncate(fd, length)
        self.rank, self.size = rank, size
        self._memory = mmap.mmap(fd, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # The object that is exported to holds the mapping for as long as the collective is there.
        self._start = ctypes.c_char.from_buffer(self._memory)
        spin = SPIN_NS if size <= usable_cpus() else 0
        self._group = ctypes.pointer(_Group(ctypes.addressof(self._start), rank, size, spin))
        self._all_reduce = library.servelite_all_reduce
        self._all_gather = library.servelite_all_gather
        self._barrier = library.servelite_barrier

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`.

        Raises:
            ValueError: x is of another dtype, not contiguous or not in main memory.
            RuntimeError: another rank is doing something else.
        """
        dtype = _dtype_codes().get(x.dtype)
        if dtype is None or not x.is_contiguous() or not x.is_cpu:
            raise ValueError(f"cannot add {_describe(x)}: it must be float32 or bfloat16, contiguous, on cpu")
        self._check(self._all_reduce(self._group, x.data_ptr(), x.numel(), dtype))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collective.all_gather`.

        Raises:
            ValueError: x is not a matrix of four-byte values, not contiguous or not in main memory.
            RuntimeError: another rank is doing something else.
        """
        if x.dim() != 2 or x.element_size() != 4 or not x.is_contiguous() or not x.is_cpu:
            raise ValueError(f"cannot gather {_describe(x)}: it must be 2-D, four-byte, contiguous, on cpu")
        rows, columns = x.shape
        out = x.new_empty((rows, self.size * columns))
        self._check(self._all_gather(self._group, x.data_ptr(), out.data_ptr(), rows, columns))
        return out

    def barrier(self) -> None:
        """See `Collective.barrier`.

        Raises:
            RuntimeError: another rank is doing something else.
        """
        self._check(self._barrier(self._group))

    def _check(self, failed: int) -> None:
        if failed == _RANKS_DIFFER:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} and another do not do the same: they diverged"
            )
        if failed:
            raise ValueError("the native collective was called with impossible sizes")


def _describe(x: Tensor) -> str:
    strided = "" if x.is_contiguous() else f" strided {tuple(x.stride())}"
    return f"{x.dtype} {list(x.shape)}{strided} on {x.device}"
