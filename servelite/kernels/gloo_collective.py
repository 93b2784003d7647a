"""The collective where there is no native one: gloo, through torch.distributed, over the loopback interface.

It adds as the native one does, so that tokens do not depend on which of the two runs.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.distributed
from torch import Tensor

# A rank that is slow or stopped is waited for: whether it hangs is the launcher's to judge.
_TIMEOUT: Final = datetime.timedelta(days=1)
_LOST_SECONDS: Final = 5.0


class GlooCollective:
    """See `kernels.collective.Collective`. One a process: it is torch.distributed's default group."""

    def __init__(self, rank: int, size: int, meeting: Path) -> None:
        """Returns when all ranks have come.

        Args:
            meeting: a file of this group alone, not there yet, through which the ranks find one another.

        Raises:
            RuntimeError: gloo cannot be set up.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = torch.distributed.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT
        )
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        first, *others = self._parts(x)
        total = first.float()
        for part in others:
            total = total + part.float()
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.new_empty((x.shape[0], self.size * x.shape[1]))
        return torch.cat(self._parts(x), dim=1)

    def barrier(self) -> None:
        _meet(torch.distributed.barrier)

    def close(self) -> None:
        """Leave the group; the process may then join another."""
        torch.distributed.destroy_process_group()

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Each rank's `x`, in rank order."""
        # As bytes: not every type travels in every version.
        mine = x.view(-1).view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        _meet(lambda: torch.distributed.all_gather(parts, mine))
        return [part.view(x.dtype).view(x.shape) for part in parts]


def _meet(operation: Callable[[], object]) -> None:
    """Run `operation`; its error comes late.

    gloo raises where another rank has died. The launcher knows of that death from the kernel and ends this
    rank too, before its error could be taken for the cause.
    """
    try:
        operation()
    except RuntimeError:
        time.sleep(_LOST_SECONDS)
        raise
