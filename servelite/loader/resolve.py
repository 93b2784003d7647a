"""From the name a user gives to the model's place on disk. No torch here: the launcher calls it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


class ModelNotFound(ValueError):
    """No model under the name that was given; one line saying what was tried."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where fetched models are kept: SERVELITE_CACHE, else XDG_CACHE_HOME, else the user's ~/.cache.

    Raises:
        ModelNotFound: none of these is known.
    """
    if own := environ.get("SERVELITE_CACHE"):
        return Path(own)
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "servelite"
    try:
        return Path.home() / ".cache" / "servelite"
    except RuntimeError:  # a user ID without an entry in the password file, as in some containers
        raise ModelNotFound("there is no home folder for the model cache; set SERVELITE_CACHE") from None


def resolve_model(name: str) -> Path:
    """The path of the model `name`: `demo` (fetched on first use), a GGUF file, or a folder.

    Raises:
        ModelNotFound: nothing is there, or a folder holds no config.json.
    """
    if name == "demo":
        from servelite.loader.demo import demo_model_path

        return demo_model_path()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = sorted(path.glob("*.gguf"))
            hint = f"; did you mean {found[0]}?" if found else ""
            raise ModelNotFound(f"model folder {name!r} holds no config.json{hint}")
        return path
    if path.is_file():
        return path
    raise ModelNotFound(f"model {name!r} is neither `demo`, nor a GGUF file, nor a folder with a config.json")
