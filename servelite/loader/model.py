"""From a model's files to a model that can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from servelite.kernels.collective import ONE_RANK, Collective
from servelite.kernels.dispatch import Kernels
from servelite.layers.build import Build
from servelite.layers.rotary import UnknownScaling
from servelite.loader.weights import check_weights, load_weights, open_weights, with_prefix
from servelite.models.base import ConfigError, Model
from servelite.models.registry import UnknownArchitecture, build_model
from servelite.tokenizer.model_files import ModelFileError, ModelFiles


class _WithoutMemory(TorchFunctionMode):
    """Within it, layers get weights that have a shape and no memory.

    `torch.device("meta")` would do the same to everything else, for which torch imports 800 modules.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        device = {"device": "meta"} if function is torch.empty else {}
        return function(*args, **(kwargs or {}), **device)


def load_model(
    files: ModelFiles, kernels: Kernels, dtype: torch.dtype = torch.float32, group: Collective = ONE_RANK
) -> Model:
    """Build the model that `files` describes and read its weights, whatever their type, as `dtype`.

    Args:
        group: the ranks that share the model, each of which calls this and gets its part.

    Raises:
        ModelFileError: the architecture, the config or a weight is not supported or damaged; the text
            is one line and names the file.
        SettingError: the model cannot be divided by that many ranks.
    """
    build = Build(kernels, dtype, group)
    try:
        with _WithoutMemory():
            outline = build_model(files.architecture, files.config, build)
    except (UnknownArchitecture, UnknownScaling, ConfigError) as error:
        raise ModelFileError(files.path, str(error)) from None
    source = with_prefix(open_weights(files), outline.prefix)
    check_weights(outline, source)  # memory is only taken for what the file holds
    model = build_model(files.architecture, files.config, build)
    load_weights(model, source, group)
    return model
