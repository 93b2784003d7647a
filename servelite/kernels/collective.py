"""What tensor-parallel ranks do together: the one interface between the layers and how ranks talk, and
which of its implementations a group gets.

Every rank calls the same operations in the same order, with shapes that it can tell from the plan alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from servelite.kernels.cpu.isa import PLAIN_TORCH, VARIABLE
from servelite.kernels.cpu.shared_collective import SharedMemoryCollective, load_library

if TYPE_CHECKING:  # the simulated runner has ranks, and no torch
    from torch import Tensor

_log = logging.getLogger(__name__)


class Collective(Protocol):
    """One rank's view of its group. A rank that is gone leaves the others waiting: the launcher ends them."""

    @property
    def rank(self) -> int:
        """From 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x` (float32 or bfloat16, contiguous, of any shape), in x's own memory.

        Added in rank order, in float32: the same bits on every rank.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """[rows, n] of four-byte values, contiguous -> [rows, size * n], in rank order."""

    def barrier(self) -> None:
        """Return when every rank has come here."""


class OneRank:
    """The `Collective` of one rank: nothing to add, nobody to wait for."""

    rank: Final = 0
    size: Final = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def barrier(self) -> None:
        """See `Collective.barrier`."""


ONE_RANK: Final = OneRank()


class NobodyWaits:
    """Ranks that do not wait for one another and have nothing to add: the simulated runner's, at worst.

    What adds or gathers raises RuntimeError.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        raise RuntimeError("ranks that do not wait for one another cannot add")

    def all_gather(self, x: Tensor) -> Tensor:
        raise RuntimeError("ranks that do not wait for one another cannot gather")

    def barrier(self) -> None:
        """Returns at once."""


def open_collective(
    memory: int,
    rank: int,
    size: int,
    *,
    folder: str,
    epoch: int,
    simulated: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Collective:
    """This rank's view of its group; all ranks choose alike, and rank 0's log says what and why.

    Native where it was built, else gloo. Simulated ranks load no torch and so have no gloo: where the native
    one is not there, they do not wait for one another, which a warning says.

    Args:
        memory: the group's memfd, empty at first.
        folder, epoch: the server's runtime folder and the group's life, where gloo's ranks find one another.

    Raises:
        OSError: there is no memory for the group.
        RuntimeError: gloo cannot be set up.
        ValueError: there is no such rank, or `memory` is another group's.
    """
    if size == 1:
        return ONE_RANK
    lacking = f"{VARIABLE} says so" if environ.get(VARIABLE) == PLAIN_TORCH and not simulated else ""
    if not lacking:
        try:
            load_library()
        except OSError as error:
            lacking = str(error)
    if not lacking:
        if rank == 0:
            _log.info("collective: native, through shared memory, %d ranks", size)
        return SharedMemoryCollective(memory, rank, size)
    if simulated:
        if rank == 0:
            _log.warning("collective: none, the simulated ranks do not wait for one another (%s)", lacking)
        return NobodyWaits(rank, size)
    from servelite.kernels.gloo_collective import GlooCollective

    if rank == 0:
        _log.warning(
            "collective: gloo, %d ranks, not the native one (%s); sums take 10 to 100 times longer",
            size, lacking,
        )  # fmt: skip
    return GlooCollective(rank, size, Path(folder) / f"collective-{epoch}")
