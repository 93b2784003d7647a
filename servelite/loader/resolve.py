"""From the name a user gives to the model's place on disk. No torch here: the launcher calls it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from servelite.loader.errors import ModelNotFound
from servelite.loader.hub import fetch, is_hub_id

__all__ = ["ModelNotFound", "cache_folder", "is_local", "resolve_model"]


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


def is_local(name: str) -> bool:
    """Whether `name` is `demo` or something on this machine, so that there is nothing to ask the hub."""
    try:
        return name == "demo" or Path(name).expanduser().exists() or not is_hub_id(name)
    except (OSError, RuntimeError):  # it cannot be looked up, which `resolve_model` tells
        return True


def resolve_model(name: str, revision: str = "") -> Path:
    """The path of the model `name`: `demo` (fetched on first use), a GGUF file, a folder, or a hub id.

    Args:
        revision: of a hub id (`hub.fetch`).

    Raises:
        ModelNotFound: nothing is there, it cannot be looked up, or a folder holds no config.json.
    """
    if name == "demo":
        from servelite.loader.demo import demo_model_path

        return demo_model_path()
    if not is_local(name):
        return fetch(name, revision)
    try:
        return _resolve_path(name, Path(name).expanduser())
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be read, ~nobody
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ModelNotFound(f"model {_shown(name)} cannot be looked up ({reason})") from None


def _shown(name: str) -> str:
    return repr(name if len(name) <= 200 else f"{name[:200]}...")


def _resolve_path(name: str, path: Path) -> Path:
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = sorted(path.glob("*.gguf"))
            hint = f"; did you mean {found[0]}?" if found else ""
            raise ModelNotFound(f"model folder {name!r} holds no config.json{hint}")
        return path
    if path.is_file():
        return path
    raise ModelNotFound(
        f"model {name!r} is neither `demo`, nor a GGUF file, nor a folder with a config.json, nor a hub id "
        "(ORG/NAME)"
    )
