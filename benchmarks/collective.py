"""The native collective beside gloo: all-reduces of two processes of one thread, in turns of 20 in one run.

    python -m benchmarks.collective
    python -m benchmarks.collective --ranks 4 --repeats 500

Microseconds of one all-reduce of float32, as rank 0 sees it after a barrier: the least and the median, and
the ratio of the medians. Each rank stays on a CPU of its own, as far as there are enough.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch

from servelite.ipc.process import die_with_parent
from servelite.kernels.collective import Collective, open_collective
from servelite.kernels.cpu.shared_collective import load_library

TURN = 20  # one after another, as a step's layers do
PAYLOADS = ((1, 640), (32, 640), (1, 4096), (32, 4096))


def microseconds(group: Collective, x: torch.Tensor) -> float:
    """Of one all-reduce, the ranks having come from one barrier."""
    x.fill_(1)
    group.barrier()
    began = time.perf_counter_ns()
    group.all_reduce(x)
    return (time.perf_counter_ns() - began) / 1e3


def run_rank(memory: int, rank: int, size: int, folder: str, repeats: int) -> None:
    """All measurements of one rank; rank 0 prints them."""
    native = open_collective(memory, rank, size, folder=folder, epoch=1, environ={})
    gloo = open_collective(memory, rank, size, folder=folder, epoch=1, environ={"SERVELITE_ISA": "torch"})
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    if rank == 0:
        print(f"{size} processes, {len(cpus)} CPUs, {repeats} of each, in us")
        print(f"{'payload':>9} {'native min':>11} {'p50':>8} {'gloo min':>10} {'p50':>8} {'ratio':>6}")
    for shape in PAYLOADS:
        x = torch.empty(shape)
        ours, theirs = [], []
        for _ in range(-(-repeats // TURN)):
            for group, times in ((native, ours), (gloo, theirs)):
                times += [microseconds(group, x) for _ in range(TURN)]
        median, gloo_median = statistics.median(ours), statistics.median(theirs)
        if rank == 0:
            print(
                f"{shape[0]:>4}x{shape[1]:<4} {min(ours):11.1f} {median:8.1f} {min(theirs):10.1f} "
                f"{gloo_median:8.1f} {gloo_median / median:6.1f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1000)
    given = parser.parse_args()
    try:
        load_library()
    except OSError as error:
        parser.error(f"there is no native collective to compare: {error}")
    torch.set_num_threads(1)
    memory = os.memfd_create("ranks")
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(1, given.ranks):
            # torch is loaded once for all of them, and has started no thread yet.
            if not (child := os.fork()):
                die_with_parent()
                run_rank(memory, rank, given.ranks, folder, given.repeats)
                os._exit(0)
            children.append(child)
        run_rank(memory, 0, given.ranks, folder, given.repeats)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
