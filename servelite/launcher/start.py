"""What it takes to start: the model found and looked at, and a front end's process."""

from __future__ import annotations

import dataclasses
import socket

import msgspec

from servelite.config import Settings
from servelite.ipc.messages import Boot
from servelite.ipc.process import ExitCode
from servelite.launcher.child import Child
from servelite.launcher.errors import LaunchError
from servelite.loader.resolve import ModelNotFound, is_local, resolve_model
from servelite.models.registry import UnknownArchitecture, check_architecture
from servelite.tokenizer.model_files import ModelFileError, open_model_files


def find_model(settings: Settings) -> Settings:
    """The settings with the model's path for its name, so that no child has to look for it again.

    Raises:
        LaunchError: there is no such model, or --revision is given for one that is on this machine.
    """
    if settings.revision and is_local(settings.model):
        raise LaunchError(
            f"--revision is {settings.revision!r}, which only a model of the hub has: {settings.model!r} is "
            "none",
            ExitCode.SETTING,
        )
    try:
        path = resolve_model(settings.model, settings.revision)
    except ModelNotFound as error:
        raise LaunchError(str(error), ExitCode.MODEL) from None
    names = tuple(dict.fromkeys(settings.served_model_name)) or (settings.model,)
    return dataclasses.replace(settings, model=str(path), revision="", served_model_name=names)


def check_model(settings: Settings) -> None:
    """Read the model's metadata, which is quick, so that damage is told before any process is started.

    Raises:
        LaunchError: the files are damaged or incomplete, or the architecture is not supported.
    """
    try:
        files = open_model_files(settings.model)
        if settings.executor != "simulated":  # which takes any model's metadata
            check_architecture(files.architecture)
    except ModelFileError as error:
        raise LaunchError(str(error), ExitCode.MODEL) from None
    except UnknownArchitecture as error:
        raise LaunchError(str(ModelFileError(settings.model, str(error))), ExitCode.MODEL) from None


def start_front_end(index: int, engine: Boot, listener: socket.socket) -> Child:
    """Front end `index`, for the engine that was started with the boot message `engine`."""
    boot = msgspec.structs.replace(engine, index=index, listen_fd=listener.fileno(), group=None)
    return Child.start(f"front end {index}", "servelite.frontend", boot, (boot.progress_fd, boot.listen_fd))
