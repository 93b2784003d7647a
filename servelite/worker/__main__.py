"""One tensor-parallel rank: `python -m servelite.worker --lifeline FD`, started by the launcher.

It computes the steps that the engine writes into the group's ring, one after the other, until it is killed:
a rank has nothing to finish or to give back.
"""

from __future__ import annotations

import logging
import sys
import time

from servelite.config import Settings
from servelite.ipc.lifeline import Lifeline
from servelite.ipc.messages import Boot, ChildReady, RankDone, RankReady
from servelite.ipc.progress import ProgressPage
from servelite.ipc.rank_group import RankEnd
from servelite.loader.resolve import resolve_model
from servelite.worker.process import loaded, run_child


def _serve(boot: Boot, settings: Settings, lifeline: Lifeline, started: float) -> None:
    # Imported here: torch comes with it, and a failure to import it is reported like any other.
    from servelite.kernels.collective import open_collective
    from servelite.worker.faults import Faults, parse_faults
    from servelite.worker.load import load_runner

    assert boot.group is not None, "a rank has a group"
    if boot.index:  # what every rank would say is said by rank 0
        logging.getLogger().setLevel(max(logging.WARNING, logging.getLogger().level))
    faults = Faults(parse_faults(settings.fault_injection, boot.group.size), boot.index, boot.epoch)
    group = open_collective(
        boot.group.collective,
        boot.index,
        boot.group.size,
        folder=boot.folder,
        epoch=boot.epoch,
        simulated=settings.executor == "simulated",
    )
    runner = load_runner(settings, resolve_model(settings.model), faults.group(group))
    loading = sum(seconds for _, seconds in runner.facts.ledger)
    ledger = (("imports", time.monotonic() - started - loading), *runner.facts.ledger)
    runner.watch(ProgressPage.attach(boot.progress_fd).beat)
    runner = faults.runner(runner)
    engine = RankEnd(boot.group, boot.index)
    send = faults.sender(engine.send)
    loaded()
    send(RankReady(runner.facts))
    lifeline.send(ChildReady(ledger))
    while True:
        plan = engine.recv_plan()
        runner.forward(plan)
        result = runner.sample(plan, engine.recv_masks() if plan.needs_masks else None)
        send(RankDone(result.epoch, result.step, result.checksum) if boot.index else result)


if __name__ == "__main__":
    sys.exit(run_child(lambda boot: f"servelite: worker {boot.index}", _serve))
