"""Tensor-parallel ranks as threads of one process: a `Collective` that also holds them to its rules."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from servelite.kernels.collective import Collective

T = TypeVar("T")


class _Meeting:
    """Where the ranks of a group hand each other what they have."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: list[tuple[str, Tensor | None]] = [("", None)] * size


class ThreadRank:
    """One rank's `Collective`. A rank that does something else than the others fails all of them."""

    def __init__(self, rank: int, size: int, meeting: _Meeting | None = None) -> None:
        """`meeting`: None for a rank that is to do alone what needs no other."""
        self.rank, self.size = rank, size
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective.all_reduce`."""
        assert x.is_contiguous() and x.dtype in (torch.float32, torch.bfloat16)
        everyone = self._meet("all_reduce", x)
        total = everyone[0].to(torch.float32, copy=True)
        for other in everyone[1:]:
            total += other
        self._part()  # nobody may write into x before all have read it
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collective.all_gather`."""
        assert x.is_contiguous() and x.element_size() == 4 and x.dim() == 2
        out = torch.cat(self._meet("all_gather", x), dim=1)
        self._part()
        return out

    def barrier(self) -> None:
        """See `Collective.barrier`."""
        self._meet("barrier", torch.empty(0))
        self._part()

    def _meet(self, call: str, x: Tensor) -> list[Tensor]:
        """What every rank has brought, in rank order."""
        meeting = self._meeting
        assert meeting is not None, f"{call} needs the other ranks"
        meeting.brought[self.rank] = (f"{call} {x.dtype} {tuple(x.shape)}", x)
        meeting.barrier.wait()
        calls = {call for call, _ in meeting.brought}
        assert len(calls) == 1, f"the ranks do not do the same: {calls}"
        return [tensor for _, tensor in meeting.brought if tensor is not None]

    def _part(self) -> None:
        assert self._meeting is not None
        self._meeting.barrier.wait()


def run_ranks(size: int, work: Callable[[Collective], T]) -> list[T]:
    """What `work` returns on each of `size` ranks, each in a thread that has one thread of torch.

    The first failure of a rank is raised; the others are let go.
    """
    meeting, threads = _Meeting(size), torch.get_num_threads()
    failures: list[BaseException] = []

    def run(rank: int) -> T | None:
        torch.set_num_threads(1)
        try:
            return work(ThreadRank(rank, size, meeting))
        except threading.BrokenBarrierError:
            return None  # another rank has failed
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()
            return None

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    torch.set_num_threads(threads)
    if failures:
        raise failures[0]
    assert not meeting.barrier.broken, "a rank did not come: the others waited a minute for it"
    return [result for result in results if result is not None]
