"""What a front end reads of a model: its files' metadata, its tokenizer, its sampling defaults."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from servelite.config import Settings
from servelite.frontend.errors import APIError
from servelite.frontend.sampling import GENERATION_CONFIG_NAMES, SAMPLING_FIELDS
from servelite.tokenizer.metadata_files import TEMPLATE_LIMIT, read_whole
from servelite.tokenizer.model_files import (
    ModelFileError,
    ModelFiles,
    open_model_files,
    read_generation_config,
    with_tokenizer,
)
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

_FROM_MODEL: Final = "auto"
_NONE: Final = "none"


@dataclass(frozen=True)
class ModelMetadata:
    """Read once, never changed."""

    files: ModelFiles
    tokenizer: Tokenizer
    sampling_defaults: Mapping[str, Any]


def read_metadata(settings: Settings) -> ModelMetadata:
    """Of the model, with the tokenizer, chat template and defaults that the settings name instead.

    Raises:
        ModelFileError: a file is not there or damaged; one line that names it.
    """
    files = open_model_files(Path(settings.model))
    if settings.tokenizer:
        files = with_tokenizer(files, Path(settings.tokenizer))
    if settings.chat_template:
        path = Path(settings.chat_template)
        try:
            text = read_whole(path, TEMPLATE_LIMIT).decode()
        except (FileNotFoundError, UnicodeDecodeError) as error:
            raise ModelFileError(path, f"--chat-template cannot be read ({error})") from None
        files = dataclasses.replace(files, chat_template=text)
    defaults = _sampling_defaults(settings.generation_config, Path(settings.model), files)
    if defaults:
        words = ", ".join(f"{name} {value}" for name, value in defaults.items())
        log.info("sampling defaults from generation_config.json: %s (--generation-config none: off)", words)
    return ModelMetadata(files, load_tokenizer(files), defaults)


def _sampling_defaults(choice: str, model: Path, files: ModelFiles) -> dict[str, Any]:
    if choice == _NONE:
        return {}
    folder = model if choice == _FROM_MODEL else Path(choice)
    given = files.generation_config if choice == _FROM_MODEL else read_generation_config(folder)
    types = {f.name: f.type for f in SAMPLING_FIELDS}
    try:
        return {
            name: types[name].read(name, given[name])
            for name in GENERATION_CONFIG_NAMES
            if given.get(name) is not None
        }
    except APIError as error:
        text = f"{error.message} (--generation-config none leaves this file out)"
        raise ModelFileError(folder / "generation_config.json", text) from None
