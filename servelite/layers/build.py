"""What layers are built with, the same for all of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from servelite.kernels.collective import ONE_RANK, Collective
from servelite.kernels.dispatch import Kernels


@dataclass(frozen=True)
class Build:
    """Passed down from the loader to every layer."""

    kernels: Kernels
    dtype: torch.dtype = torch.float32  # of weights, activations and the KV cache
    group: Collective = ONE_RANK  # the ranks that share each layer
