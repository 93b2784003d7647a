"""The life of a process that runs a model, or drives those that do: from its start to its last words."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import time
import traceback
from collections.abc import Callable
from typing import Final

from servelite.config import SettingError, Settings
from servelite.ipc.lifeline import Lifeline, clip
from servelite.ipc.messages import Boot, ChildFailed
from servelite.ipc.process import ExitCode, die_with_parent, set_title
from servelite.loader.resolve import ModelNotFound
from servelite.tokenizer.model_files import ModelFileError
from servelite.worker.base import StepFailedError

_FAILURES: Final = (
    (SettingError, ExitCode.SETTING, ""),
    (ModelNotFound, ExitCode.MODEL, ""),
    (ModelFileError, ExitCode.MODEL, ""),
    (MemoryError, ExitCode.MEMORY, "lower --max-num-seqs, --max-model-len or --num-gpu-blocks-override"),
    (StepFailedError, ExitCode.MEMORY, "lower --max-num-batched-tokens or --kv-cache-memory-bytes"),
)


def run_child(title: Callable[[Boot], str], serve: Callable[[Boot, Settings, Lifeline, float], None]) -> int:
    """Take the boot message from the launcher, `serve`, and tell the launcher of an error.

    Args:
        title: what `ps` shows.
        serve: its last argument is when this process began, by `time.monotonic`.

    Returns:
        The exit code, an `ExitCode`.
    """
    started = time.monotonic()
    gc.disable()  # until all is loaded (`loaded`): what start-up makes is hardly ever garbage
    die_with_parent()
    # The launcher decides when to end: Ctrl-C and a service manager's SIGTERM reach the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline", type=int, required=True)
    lifeline = Lifeline.from_fd(parser.parse_args().lifeline)
    # The launcher may have died before this process could ask to die with it, its boot message sent.
    if lifeline.other_end_gone or not isinstance(boot := lifeline.recv(), Boot):
        return ExitCode.OK
    set_title(title(boot))
    try:
        settings = Settings.from_dict(boot.settings)
        logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(name)s: %(message)s")
        serve(boot, settings, lifeline, started)
    except Exception as error:
        failure = _failure(error)
        lifeline.send(failure)
        return failure.exit_code
    return ExitCode.OK


def loaded() -> None:
    """What start-up made lives for ever, and no collection need look at it.

    One now would take a tenth of the whole start to find some thousand objects.
    """
    gc.freeze()
    gc.enable()


def _failure(error: Exception) -> ChildFailed:
    code, hint = next(
        ((code, hint) for kind, code, hint in _FAILURES if isinstance(error, kind)), (ExitCode.INTERNAL, "")
    )
    return ChildFailed(
        kind=type(error).__name__,
        message=clip(str(error)),
        hint=hint,
        exit_code=int(code),
        traceback=clip(traceback.format_exc()),
    )
