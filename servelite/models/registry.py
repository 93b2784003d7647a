"""From an architecture's name, as config.json has it, to the class that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from servelite.kernels.dispatch import Kernels
from servelite.models.base import CausalModel
from servelite.models.llama import LlamaForCausalLM

ARCHITECTURES: dict[str, Callable[[dict[str, Any], Kernels], CausalModel]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}


class UnknownArchitecture(ValueError):
    """No class runs this architecture; the text names it and those that are there."""


def build_model(architecture: str, config: dict[str, Any], kernels: Kernels) -> CausalModel:
    """A model with its memory allocated and no weights in it yet.

    Raises:
        UnknownArchitecture: there is no such class.
        ConfigError: the class cannot do what the config asks for.
    """
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownArchitecture(f"the model's architecture is {architecture!r}; supported: {known}")
    return ARCHITECTURES[architecture](config, kernels)
