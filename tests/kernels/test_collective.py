"""What ranks do together: the sums' bits, the order of rounds, and what happens when one does not come."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from servelite.kernels import collective, gloo_collective
from servelite.kernels.collective import ONE_RANK, NobodyWaits, open_collective
from servelite.kernels.cpu import shared_collective
from servelite.kernels.cpu.isa import library_path
from servelite.kernels.cpu.shared_collective import SPIN_NS, SharedMemoryCollective, load_library
from tests.kernels import collective_ranks
from tests.kernels.collective_ranks import BF16, in_threads
from tests.sources import ROOT

needs_native = pytest.mark.skipif(
    library_path("collective") is None, reason="the native kernels are not built"
)
LINE_WORDS = 32  # of 4 bytes, from one rank's sequence word to the next

BARRIERS = """
import os, sys
from servelite.ipc.process import die_with_parent
from servelite.kernels.cpu.shared_collective import SharedMemoryCollective
fd, rank, size = map(int, sys.argv[1:])
die_with_parent()
group = SharedMemoryCollective(fd, rank, size)
assert "torch" not in sys.modules
while True:
    group.barrier()
"""


class Group:
    """Processes, without torch, that go from barrier to barrier; what they share is read from outside."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("ranks")
        length: int = load_library().servelite_collective_bytes(size)
        os.ftruncate(self.fd, length)
        words = np.frombuffer(mmap.mmap(self.fd, length), np.uint32)
        self._sequences = words[: size * LINE_WORDS : LINE_WORDS]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", BARRIERS, *map(str, (self.fd, rank, size))],
                cwd=ROOT,
                pass_fds=[self.fd],
            )
            for rank in range(size)
        ]

    def round(self) -> int:
        """The last round that all have entered."""
        return int(self._sequences.min())

    def advances(self) -> bool:
        """Whether they come a thousand rounds further."""
        goal = self.round() + 1000
        return wait_until(lambda: self.round() >= goal)

    def cpu_seconds(self, *ranks: int) -> float:
        """What these ranks have used so far."""
        fields = [Path(f"/proc/{self.processes[rank].pid}/stat").read_text().split() for rank in ranks]
        return sum(int(each[13]) + int(each[14]) for each in fields) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        os.close(self.fd)


@contextmanager
def barriers(size: int) -> Iterator[Group]:
    group = Group(size)
    try:
        assert group.advances()
        yield group
    finally:
        group.close()


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether it becomes true in this time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@needs_native
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_have_the_bits_of_rank_order(size: int) -> None:
    in_threads(size, lambda group: collective_ranks.sums_of_random_sizes(group, size))


@needs_native
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gathering(size: int) -> None:
    in_threads(size, lambda group: collective_ranks.gathers_of_random_shapes(group, size))


@needs_native
def test_four_ranks_in_turns() -> None:
    in_threads(4, lambda group: collective_ranks.nobody_overtakes(group, 300))


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_with_native_and_gloo_alike(size: int, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.kernels.collective_ranks", str(size), str(tmp_path)]
    subprocess.run(program, cwd=ROOT, check=True, timeout=110)


@needs_native
def test_ranks_that_outnumber_the_cpus_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_collective, "usable_cpus", lambda: 2)
    spins = {size: in_threads(size, lambda group: group._group.contents.spin_ns)[0] for size in (1, 2, 3)}
    assert spins == {1: SPIN_NS, 2: SPIN_NS, 3: 0}


@needs_native
def test_values_that_are_no_numbers() -> None:
    def add(group: SharedMemoryCollective) -> list[float]:
        special = [torch.inf, -torch.inf, torch.nan, -0.0, 3e38]
        x = torch.tensor(special if group.rank == 0 else [1.0, 1.0, 1.0, -0.0, 3e38])
        half = group.all_reduce(x.to(BF16))
        assert half.isnan().tolist() == [False, False, True, False, False]
        return group.all_reduce(x).tolist()

    first, second = in_threads(2, add)
    assert str(first) == str(second) == "[inf, -inf, nan, -0.0, inf]"


@needs_native
def test_the_rounds_wrap_around() -> None:
    fd, size = os.memfd_create("ranks"), 3
    os.ftruncate(fd, load_library().servelite_collective_bytes(size))
    words = np.frombuffer(mmap.mmap(fd, 0), np.uint32)
    words[: size * LINE_WORDS : LINE_WORDS] = 2**32 - 50
    in_threads(size, lambda group: collective_ranks.nobody_overtakes(group, 100), fd)
    assert words[0] < 200


@needs_native
def test_a_sleeper_is_woken() -> None:
    """Without wakes each late rank would cost the others the time-out of a tenth of a second."""

    def often_late(group: SharedMemoryCollective) -> float:
        began = time.monotonic()
        for round in range(200):
            if round % group.size == group.rank:
                time.sleep(0.001)
            group.barrier()
        return time.monotonic() - began

    assert max(in_threads(3, often_late)) < 5


@needs_native
@pytest.mark.parametrize("size", [2, 3])
def test_a_stopped_rank_is_waited_for_asleep(size: int) -> None:
    with barriers(size) as group:
        stopped = group.processes[1]
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(0.2)
        others = [rank for rank in range(size) if rank != 1]
        round, used = group.round(), group.cpu_seconds(*others)
        time.sleep(1)
        assert group.round() == round
        assert group.cpu_seconds(*others) - used < 0.2
        stopped.send_signal(signal.SIGCONT)
        assert group.advances()


@needs_native
def test_a_killed_rank_leaves_the_others_waiting_and_killable() -> None:
    with barriers(3) as group:
        group.processes[2].kill()
        group.processes[2].wait()
        time.sleep(0.2)
        round, used = group.round(), group.cpu_seconds(0, 1)
        time.sleep(1)
        assert group.round() == round and group.cpu_seconds(0, 1) - used < 0.2
        assert [process.poll() for process in group.processes] == [None, None, -signal.SIGKILL]
        group.processes[0].kill()
        assert group.processes[0].wait(5) == -signal.SIGKILL


@needs_native
@pytest.mark.parametrize(
    "differently",
    [
        lambda group: group.barrier(),
        lambda group: group.all_reduce(torch.ones(5)),
        lambda group: group.all_reduce(torch.ones(4, dtype=BF16)),
        lambda group: group.all_gather(torch.ones(2, 2)),
    ],
    ids=["barrier", "size", "dtype", "gather"],
)
def test_ranks_that_diverge_say_so(differently: Callable[[SharedMemoryCollective], object]) -> None:
    def diverge(group: SharedMemoryCollective) -> None:
        group.barrier()
        with pytest.raises(RuntimeError, match=f"rank {group.rank} of 2 and another .* diverged"):
            group.all_reduce(torch.ones(4)) if group.rank else differently(group)

    in_threads(2, diverge)


@needs_native
def test_a_tensor_that_cannot_be_taken() -> None:
    def refuse(group: SharedMemoryCollective) -> None:
        for wrong in (torch.ones(2, dtype=torch.float64), torch.ones(4, 4).T[:2], torch.ones(2).half()):
            with pytest.raises(ValueError, match=r"cannot add torch\.float.* must be float32 or bfloat16"):
                group.all_reduce(wrong)
        for wrong in (torch.ones(2), torch.ones(2, 2, dtype=torch.int64), torch.ones(4, 4).T[:2]):
            with pytest.raises(ValueError, match=r"cannot gather .* it must be 2-D, four-byte"):
                group.all_gather(wrong)

    in_threads(1, refuse)


@needs_native
def test_a_group_that_cannot_be() -> None:
    fd = os.memfd_create("ranks")
    for rank, size in ((0, 0), (0, 65), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"no rank {rank} of {size}: .* 1 to 64"):
            SharedMemoryCollective(fd, rank, size)
    SharedMemoryCollective(fd, 0, 2)
    with pytest.raises(ValueError, match="holds no memory of a group of 3 ranks"):
        SharedMemoryCollective(fd, 0, 3)
    os.close(fd)


@needs_native
def test_the_library_refuses_impossible_arguments() -> None:
    library, impossible = load_library(), 1
    fd = os.memfd_create("ranks")
    alone = SharedMemoryCollective(fd, 0, 1)
    os.close(fd)
    data = ctypes.create_string_buffer(64)
    assert library.servelite_barrier(None) == impossible
    for count, dtype, at in ((-1, 0, data), (1 << 56, 0, data), (1, 2, data), (1, -1, data), (1, 0, None)):
        assert library.servelite_all_reduce(alone._group, at, count, dtype) == impossible
    for rows, columns in ((-1, 1), (1, -1), (1 << 40, 1 << 40), (1 << 40, 1 << 20)):
        assert library.servelite_all_gather(alone._group, data, data, rows, columns) == impossible
    assert library.servelite_all_gather(alone._group, data, None, 1, 1) == impossible
    assert library.servelite_all_reduce(alone._group, data, 16, 0) == 0


def test_nothing_here_loads_torch() -> None:
    program = "import sys; import servelite.kernels.collective; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("ranks")
    yield fd
    os.close(fd)


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise OSError("it was not built")

    monkeypatch.setattr(collective, "load_library", load)


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, Path]]:
    """How gloo's collective is made: kept here, and not made."""
    made: list[tuple[int, int, Path]] = []
    monkeypatch.setattr(gloo_collective, "GlooCollective", lambda *how: made.append(how))
    return made


def test_one_rank_needs_nobody() -> None:
    assert open_collective(-1, 0, 1, folder="", epoch=1) is ONE_RANK


@needs_native
def test_native_where_it_is_built(memory: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = open_collective(memory, 0, 2, folder="", epoch=1, environ={})
    assert isinstance(found, SharedMemoryCollective) and (found.rank, found.size) == (0, 2)
    open_collective(memory, 1, 2, folder="", epoch=1, environ={})
    assert caplog.messages == ["collective: native, through shared memory, 2 ranks"]


def test_gloo_where_there_is_no_native_one(
    not_built: None, gloo: list[tuple[int, int, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    open_collective(-1, 0, 2, folder="folder", epoch=7, environ={})
    assert gloo == [(0, 2, Path("folder/collective-7"))]
    assert "gloo, 2 ranks, not the native one (it was not built)" in caplog.text


def test_gloo_where_native_kernels_are_not_wanted(
    gloo: list[tuple[int, int, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    open_collective(-1, 1, 2, folder="folder", epoch=7, environ={"SERVELITE_ISA": "torch"})
    assert gloo == [(1, 2, Path("folder/collective-7"))] and not caplog.messages
    open_collective(-1, 0, 2, folder="folder", epoch=7, environ={"SERVELITE_ISA": "torch"})
    assert "(SERVELITE_ISA says so)" in caplog.text


def test_simulated_ranks_have_a_barrier_or_say_that_they_have_none(
    memory: int,
    gloo: list[tuple[int, int, Path]],
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    environ = {"SERVELITE_ISA": "torch"}
    if library_path("collective"):
        found = open_collective(memory, 0, 2, folder="", epoch=1, simulated=True, environ=environ)
        assert isinstance(found, SharedMemoryCollective)
    request.getfixturevalue("not_built")
    found = open_collective(memory, 0, 2, folder="", epoch=1, simulated=True, environ=environ)
    assert isinstance(found, NobodyWaits) and gloo == []
    assert "none, the simulated ranks do not wait for one another (it was not built)" in caplog.text
    found.barrier()
    for operation in (found.all_reduce, found.all_gather):
        with pytest.raises(RuntimeError, match="do not wait for one another"):
            operation(torch.ones(1, 1))


LOSS = """
import os, sys, time
from pathlib import Path
import torch
from servelite.kernels import gloo_collective
from tests.kernels.collective_ranks import BF16, sums
gloo_collective._LOST_SECONDS = 0.5
torch.set_num_threads(1)
child = os.fork()
group = gloo_collective.GlooCollective(int(child == 0), 2, Path(sys.argv[1]) / "meeting")
sums(group, (640,), BF16, seed=1)
group.barrier()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
began = time.monotonic()
try:
    group.all_reduce(torch.ones(3))
except RuntimeError:
    assert time.monotonic() - began >= 0.5
    group.close()
else:
    sys.exit("the loss was not noticed")
"""


def test_gloo_adds_alike_and_its_error_for_a_lost_rank_comes_late(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LOSS, str(tmp_path)], cwd=ROOT, check=True, timeout=100)


@needs_native
@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    command = [sys.executable, "-m", "benchmarks.collective", "--repeats", "20"]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=100, capture_output=True, text=True)
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == [
        "1x640",
        "32x640",
        "1x4096",
        "32x4096",
    ]
