"""What a rank does in the collective's tests, and what must come out: in threads, or in processes.

`python -m tests.kernels.collective_ranks SIZE FOLDER` is SIZE processes that go through all of it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servelite.ipc.process import die_with_parent
from servelite.kernels.collective import Collective, open_collective
from servelite.kernels.cpu.shared_collective import SharedMemoryCollective

SLOT = 512 << 10  # bytes
F32, BF16 = torch.float32, torch.bfloat16
T = TypeVar("T")


def in_threads(size: int, work: Callable[[SharedMemoryCollective], T], memory: int = -1) -> list[T]:
    """`work` of each rank's collective, a thread each; what it returns, in rank order.

    The first error is raised at once: the other ranks may wait for ever then, as daemons.
    """
    fd = os.memfd_create("ranks") if memory < 0 else memory
    ranks = [SharedMemoryCollective(fd, rank, size) for rank in range(size)]
    os.close(fd)
    ended: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()

    def run(group: SharedMemoryCollective) -> None:
        try:
            ended.put((group.rank, work(group), None))
        except BaseException as error:
            ended.put((group.rank, None, error))

    for group in ranks:
        threading.Thread(target=run, args=(group,), daemon=True).start()
    found = {}
    for _ in ranks:
        rank, result, error = ended.get(timeout=60)
        if error:
            raise error
        found[rank] = result
    return [found[rank] for rank in range(size)]


def bits(x: Tensor) -> npt.NDArray[np.integer]:
    """The values' own bits: -0 is not 0."""
    return x.view(torch.int16 if x.dtype == BF16 else torch.int32).numpy()


def noise(seed: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values of very different sizes: any other order of adding them gives other bits."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * 10.0 ** random.integers(-3, 4, shape)
    return torch.from_numpy(np.asarray(values, np.float32)).to(dtype)


def plain_sum(parts: list[Tensor]) -> npt.NDArray[np.integer]:
    """The bits of the sum in rank order, in float32, rounded once to nearest-even: by numpy."""
    floats = [part.float().numpy() for part in parts]
    total = floats[0].copy()
    for part in floats[1:]:
        total += part
    words = total.view(np.uint32)
    if parts[0].dtype == F32:
        return words.view(np.int32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16).view(np.int16)


def sums(group: Collective, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    """One all-reduce, checked bit for bit; in place."""
    parts = [noise((seed, rank), shape, dtype) for rank in range(group.size)]
    expected, mine = plain_sum(parts), parts[group.rank]
    assert group.all_reduce(mine) is mine
    np.testing.assert_array_equal(bits(mine), expected)


def gathers(group: Collective, shape: tuple[int, int], seed: int) -> None:
    """One all-gather, checked bit for bit; the input is as it was."""
    parts = [noise((seed, rank), shape, F32) for rank in range(group.size)]
    before = parts[group.rank].clone()
    np.testing.assert_array_equal(bits(group.all_gather(parts[group.rank])), bits(torch.cat(parts, 1)))
    np.testing.assert_array_equal(bits(parts[group.rank]), bits(before))


def sums_of_random_sizes(group: Collective, seed: int) -> None:
    """Sizes at, below and above what a slot holds, and others; both types."""
    for dtype in (F32, BF16):
        slot = SLOT // dtype.itemsize
        drawn = np.random.default_rng(seed).integers(1, 2 * slot, 4).tolist()
        for count in (0, 1, 15, 640, 1023, 1025, slot - 1, slot, slot + 1, 2 * slot + 3, *drawn):
            sums(group, (count,), dtype, seed)
        sums(group, (3, 5, 7), dtype, seed)
        sums(group, (), dtype, seed)


def gathers_of_random_shapes(group: Collective, seed: int) -> None:
    """Rows longer and shorter than a slot, one word a row, none."""
    slot = SLOT // 4
    drawn = np.random.default_rng(seed).integers(1, 700, (3, 2)).tolist()
    shapes = [(1, 1), (5, 2), (0, 4), (4, 0), (1, slot + 1), (slot + 3, 1), (3, slot - 1)]
    for shape in [*shapes, *map(tuple, drawn)]:
        gathers(group, shape, seed)
    ids = torch.arange(6, dtype=torch.int32).reshape(3, 2) + 100 * group.rank
    expected = torch.cat([ids + 100 * (rank - group.rank) for rank in range(group.size)], dim=1)
    assert torch.equal(group.all_gather(ids), expected)


def nobody_overtakes(group: Collective, rounds: int) -> None:
    """Many rounds with pauses at random; a value of another round would show."""
    pauses = np.random.default_rng(group.rank).choice([0, 0, 0, 0, 1e-5, 2e-4, 1e-3], rounds)
    for round, pause in enumerate(pauses.tolist()):
        x = torch.full((37,), float(round * (group.rank + 1)))
        group.all_reduce(x)
        assert x.tolist() == [round * group.size * (group.size + 1) / 2] * 37
        if round % 3 == 0:
            group.barrier()
        if round % 5 == 0:
            found = group.all_gather(torch.tensor([[round, group.rank]], dtype=torch.int32))
            assert found.view(-1, 2).tolist() == [[round, rank] for rank in range(group.size)]
        if pause:
            time.sleep(pause)


def _rank(group: Collective, folder: str) -> None:
    seed = 7
    sums_of_random_sizes(group, seed)
    gathers_of_random_shapes(group, seed)
    nobody_overtakes(group, 2000)
    environ = {"SERVELITE_ISA": "torch"}
    gloo = open_collective(-1, group.rank, group.size, folder=folder, epoch=1, environ=environ)
    sums_of_random_sizes(gloo, seed)
    gathers_of_random_shapes(gloo, seed)
    nobody_overtakes(gloo, 20)
    gloo.barrier()


def main() -> None:
    """Fork the ranks (torch is imported once, and has computed nothing yet) and be rank 0."""
    size, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    memory = os.memfd_create("ranks")
    rank = 0
    children: list[int] = []
    for other in range(1, size):
        if not (child := os.fork()):
            die_with_parent()
            rank, children = other, []
            break
        children.append(child)
    _rank(open_collective(memory, rank, size, folder=folder, epoch=1), folder)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)


if __name__ == "__main__":
    main()
