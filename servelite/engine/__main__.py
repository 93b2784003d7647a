"""The engine core's process: `python -m servelite.engine --lifeline FD`, started by the launcher."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from servelite.config import Settings
from servelite.engine.build import build_engine, ready_message
from servelite.engine.mailbox import SocketMailbox
from servelite.executor.base import Executor
from servelite.executor.in_process import InProcessExecutor
from servelite.executor.multi_process import MultiProcessExecutor
from servelite.ipc.lifeline import Lifeline
from servelite.ipc.messages import Boot, ChildReady, RankGroup
from servelite.ipc.progress import ProgressPage
from servelite.ipc.sockets import EngineSocket
from servelite.loader.resolve import resolve_model
from servelite.tokenizer.grammar import Grammars
from servelite.tokenizer.model_files import open_model_files, with_tokenizer
from servelite.tokenizer.tokenizer import load_tokenizer
from servelite.worker.process import loaded, run_child

_Ledger = list[tuple[str, float]]


def _serve(boot: Boot, settings: Settings, lifeline: Lifeline, started: float) -> None:
    progress = ProgressPage.attach(boot.progress_fd)
    if boot.group is not None:
        executor, ledger = _follow_ranks(boot.group, started)
    else:
        executor, ledger = _load_model(settings, boot.epoch, progress, started)
    sock = EngineSocket(boot.engine_address)
    try:
        ready = ready_message(settings, executor.facts, ledger, index=boot.index, epoch=boot.epoch)
        mailbox = SocketMailbox(sock, lifeline, ready)
        load = partial(_load_grammars, settings)
        core = build_engine(
            settings, executor, mailbox, progress, index=boot.index, epoch=boot.epoch, load_grammars=load
        )
        loaded()
        lifeline.send(ChildReady(ledger=ready.ledger))
        core.run()
    finally:
        executor.close()
        sock.close()


def _load_model(
    settings: Settings, epoch: int, progress: ProgressPage, started: float
) -> tuple[Executor, _Ledger]:
    """The model in this process."""
    # Imported here: torch comes with it, and a failure to import it is reported like any other.
    from servelite.worker.faults import Faults, parse_faults
    from servelite.worker.load import load_runner

    faults = Faults(parse_faults(settings.fault_injection), 0, epoch)
    runner = load_runner(settings, resolve_model(settings.model))
    loading = sum(seconds for _, seconds in runner.facts.ledger)
    ledger = [("imports", time.monotonic() - started - loading), *runner.facts.ledger]
    runner.watch(progress.beat)
    return InProcessExecutor(faults.runner(runner), settings.async_depth), ledger


def _follow_ranks(group: RankGroup, started: float) -> tuple[Executor, _Ledger]:
    """The model in other processes; returns when all of them have loaded it."""
    began = time.monotonic()
    executor = MultiProcessExecutor(group)
    assert executor.facts
    return executor, [("imports", began - started), ("ranks", time.monotonic() - began)]


def _load_grammars(settings: Settings) -> Grammars:
    """For the vocabulary that the front ends write text with."""
    files = open_model_files(resolve_model(settings.model))
    if settings.tokenizer:
        files = with_tokenizer(files, Path(settings.tokenizer))
    return Grammars(load_tokenizer(files))


if __name__ == "__main__":
    sys.exit(run_child(lambda _: "servelite: engine core", _serve))
