"""From a model's files to a model that can run."""

from __future__ import annotations

import torch

from servelite.kernels.dispatch import Kernels
from servelite.layers.build import Build
from servelite.layers.rotary import UnknownScaling
from servelite.loader.weights import load_weights, open_weights
from servelite.models.base import CausalModel, ConfigError
from servelite.models.registry import UnknownArchitecture, build_model
from servelite.tokenizer.model_files import ModelFileError, ModelFiles


def load_model(files: ModelFiles, kernels: Kernels, dtype: torch.dtype = torch.float32) -> CausalModel:
    """Build the model that `files` describes and read its weights, whatever their type, as `dtype`.

    Raises:
        ModelFileError: the architecture, the config or a weight is not supported or damaged; the text
            is one line and names the file.
    """
    try:
        model = build_model(files.architecture, files.config, Build(kernels, dtype))
    except (UnknownArchitecture, UnknownScaling, ConfigError) as error:
        raise ModelFileError(files.path, str(error)) from None
    load_weights(model, open_weights(files))
    return model
