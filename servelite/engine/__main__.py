"""The engine core's process: `python -m servelite.engine --lifeline FD`, started by the launcher."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
import traceback
from typing import Final

from servelite.config import SettingError, Settings
from servelite.engine.build import build_engine, ready_message
from servelite.engine.mailbox import SocketMailbox
from servelite.executor.in_process import InProcessExecutor
from servelite.ipc.lifeline import Lifeline, clip
from servelite.ipc.messages import Boot, ChildFailed, ChildReady
from servelite.ipc.process import ExitCode, die_with_parent, set_title
from servelite.ipc.progress import ProgressPage
from servelite.ipc.sockets import EngineSocket
from servelite.loader.resolve import ModelNotFound, resolve_model
from servelite.tokenizer.model_files import ModelFileError

_FAILURES: Final = (
    (SettingError, ExitCode.SETTING, ""),
    (ModelNotFound, ExitCode.MODEL, ""),
    (ModelFileError, ExitCode.MODEL, ""),
    (MemoryError, ExitCode.MEMORY, "lower --max-num-seqs, --max-model-len or --num-gpu-blocks-override"),
)


def main() -> int:
    """Run one life of an engine; the exit code is an `ExitCode`."""
    started = time.monotonic()
    gc.disable()  # until all is loaded: what start-up makes is hardly ever garbage
    die_with_parent(os.getppid())
    # The launcher decides when to end: Ctrl-C and a service manager's SIGTERM reach the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline", type=int, required=True)
    lifeline = Lifeline.from_fd(parser.parse_args().lifeline)
    set_title("servelite: engine core")
    boot = lifeline.recv()
    if not isinstance(boot, Boot):
        return ExitCode.OK  # the launcher is gone already
    try:
        _serve(boot, lifeline, started)
    except Exception as error:
        failure = _failure(error)
        lifeline.send(failure)
        return failure.exit_code
    return ExitCode.OK


def _serve(boot: Boot, lifeline: Lifeline, started: float) -> None:
    settings = Settings.from_dict(boot.settings)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(name)s: %(message)s")
    # Imported here: torch comes with it, and a failure to import it is reported like any other.
    from servelite.worker.faults import FaultyRunner, parse_faults
    from servelite.worker.load import load_runner

    faults = parse_faults(settings.fault_injection)
    runner = load_runner(settings, resolve_model(settings.model))
    loading = sum(seconds for _, seconds in runner.facts.ledger)
    ledger = [("imports", time.monotonic() - started - loading), *runner.facts.ledger]
    if faults:
        runner = FaultyRunner(runner, faults, boot.epoch)
    executor = InProcessExecutor(runner, settings.async_depth)
    sock = EngineSocket(boot.engine_address)
    try:
        ready = ready_message(settings, runner.facts, ledger, index=boot.index, epoch=boot.epoch)
        mailbox = SocketMailbox(sock, lifeline, ready)
        progress = ProgressPage.attach(boot.progress_fd)
        runner.watch(progress.beat)
        core = build_engine(settings, executor, mailbox, progress, index=boot.index, epoch=boot.epoch)
        # What start-up made lives for ever, and no collection need look at it. One now would take a tenth
        # of the whole start to find some thousand objects.
        gc.freeze()
        gc.enable()
        lifeline.send(ChildReady(ledger=ready.ledger))
        core.run()
    finally:
        executor.close()
        sock.close()


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


if __name__ == "__main__":
    sys.exit(main())
