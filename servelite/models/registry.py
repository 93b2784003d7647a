"""From an architecture's name, as config.json has it, to the class that runs it.

A family's file is imported when one of its models is built: naming what is supported needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from servelite.layers.build import Build
    from servelite.models.base import Model

ARCHITECTURES: Final = {
    "Gemma3ForCausalLM": "gemma3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Class and the module of `servelite.models` that has it; the class has the architecture's own name."""

ENCODERS: Final = {"BertModel": "bert"}
"""The same, of those that make vectors and no text."""

_MODULES: Final = ARCHITECTURES | ENCODERS


class UnknownArchitecture(ValueError):
    """No class runs this architecture; the text names it and those that are there."""


def check_architecture(architecture: str) -> None:
    """
    Raises:
        UnknownArchitecture: there is no class for it.
    """
    if architecture not in _MODULES:
        known = ", ".join(sorted(_MODULES))
        raise UnknownArchitecture(f"the model's architecture is {architecture!r}; supported: {known}")


def build_model(architecture: str, config: dict[str, Any], build: Build) -> Model:
    """A model with its memory allocated and no weights in it yet.

    Args:
        config: as Hugging Face's config.json names it.

    Raises:
        UnknownArchitecture: there is no such class.
        ConfigError: the class cannot do what the config asks for.
        UnknownScaling: of its `rope_scaling`.
        SettingError: it cannot be divided by as many ranks as `build.group` has.
    """
    check_architecture(architecture)
    module = importlib.import_module(f"servelite.models.{_MODULES[architecture]}")
    return getattr(module, architecture)(config, build)
