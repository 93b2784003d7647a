"""A front end process: opens the model's metadata, serves HTTP, obeys the launcher."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import uvloop

from servelite.config import Settings
from servelite.frontend.app import make_app
from servelite.frontend.errors import engine_dead, quarantined, shutting_down
from servelite.frontend.http_server import HTTPServer
from servelite.frontend.model_metadata import read_metadata
from servelite.frontend.service import Service
from servelite.frontend.tls import tls_context
from servelite.ipc.lifeline import Lifeline
from servelite.ipc.messages import (
    Boot,
    ChildReady,
    Drain,
    Drained,
    EngineDown,
    EngineStalled,
    EngineUp,
    Passed,
    Quarantine,
    Resubmit,
    Stop,
    ToChild,
)
from servelite.ipc.process import usable_cpus
from servelite.ipc.progress import ProgressPage
from servelite.observability.logs import configure_logs
from servelite.observability.shared_metrics import PERIOD_S

log = logging.getLogger(__name__)

_LAST_WORDS_S: Final = 1.0  # for error chunks to reach the sockets, once answers were ended


def serve(lifeline: Lifeline, boot: Boot) -> None:
    """Serve until told to stop; returns when everything is closed.

    Raises:
        ModelFileError: the model's files are damaged.
        InvalidTemplate: its chat template is no valid Jinja.
        OSError, RuntimeError, msgspec.MsgspecError: what ends a front end.
    """
    settings = Settings.from_dict(boot.settings)
    configure_logs(settings.log_level, f"frontend-{boot.index}")
    metadata = read_metadata(settings)
    page = ProgressPage.attach(boot.progress_fd)

    # What start-up made lives for ever, and a request's objects die by reference count: looking at
    # them all every 700 allocations would cost a tenth of the per-token path.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)

    async def main() -> None:
        service = Service(settings, boot.index, page.slots, metadata, usable_cpus())
        await FrontEnd(lifeline, boot, service).run()

    uvloop.run(main())


class FrontEnd:
    """The tasks of one front end: HTTP, the engine's socket, the launcher's line."""

    def __init__(self, lifeline: Lifeline, boot: Boot, service: Service) -> None:
        self._lifeline = lifeline
        self._boot = boot
        self._service = service
        settings = service.settings
        self._server = HTTPServer(make_app(service), settings.timeout_keep_alive, tls_context(settings))
        self._draining: asyncio.Task[None] | None = None
        self._epoch = -1  # of the engine it is connected to
        self._reader: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        service.engine.passed = self._tell_passed

    async def run(self) -> None:
        """Until Stop; a task that fails ends the process with its exception."""
        asyncio.get_running_loop().add_reader(self._lifeline.fileno(), self._obey)
        listener = socket.socket(fileno=self._boot.listen_fd)
        self._connect(self._boot.engine_address, self._boot.epoch)
        self._serving = self._begin(self._announce(), "announce")
        sharing = None
        if self._service.settings.api_workers > 1:
            sharing = self._begin(self._share_metrics(), "metrics")
        server = asyncio.create_task(self._server.run_on(listener), name="http")
        try:
            await asyncio.wait({server, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            server.result()
        finally:
            self._service.close()
            tasks = [task for task in (self._reader, self._serving, sharing) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task whose failure is the process's."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._note_failure)
        return task

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and not self._failure.done():
            self._failure.set_exception(task.exception())  # type: ignore[arg-type]

    def _connect(self, address: str, epoch: int) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._epoch = epoch
        self._reader = self._begin(self._service.engine.run(address, epoch), "engine reader")

    async def _share_metrics(self) -> None:
        exchange = self._service.metrics.share(Path(self._boot.folder))
        while True:
            exchange.publish()
            await asyncio.sleep(PERIOD_S)

    async def _announce(self) -> None:
        """Open the door once the engine is ready, and tell the launcher."""
        await self._server.listening()
        facts = await self._service.engine.ready()
        if (size := self._service.tokenizer.vocab_size) > facts.vocab_size:
            log.warning(
                "the tokenizer has %d tokens, the model %d: a prompt with one beyond these is refused; "
                "is it this model's tokenizer?",
                size,
                facts.vocab_size,
            )
        self._service.lifecycle.serve()
        self._lifeline.send(ChildReady())

    async def _serve_again(self) -> None:
        """All requests are with a new engine."""
        await self._service.engine.ready()
        self._service.lifecycle.serve()

    def _obey(self) -> None:
        message: ToChild | None = self._lifeline.recv()  # type: ignore[assignment]
        match message:
            case None:
                os._exit(1)  # the launcher is dead: nobody would ever end this process
            case Stop():
                self._server.stop()
            case Drain(delay, timeout):
                if self._draining is not None:
                    self._draining.cancel()  # the launcher has changed its mind: now it is at once
                self._draining = asyncio.create_task(self._drain(delay, timeout), name="drain")
            case EngineDown(_, cause, final):
                self._lose_engine(cause, final=final)
            case EngineStalled(stalled):
                self._service.lifecycle.stall(stalled)
            case EngineUp(address, epoch):
                if epoch != self._epoch:  # else this front end was started for this very engine
                    self._connect(address, epoch)
            case Resubmit(requests):
                self._resubmit(requests)
            case Quarantine(request, cause):
                self._service.engine.quarantine(request, quarantined(cause))
            case _:
                log.warning(
                    "a control message that this front end does not act on: %s", type(message).__name__
                )

    def _lose_engine(self, cause: str, *, final: bool) -> None:
        """The engine is dead. Unless that is final, its requests wait for the next, and not for ever."""
        service, settings = self._service, self._service.settings
        if self._serving is not None:
            self._serving.cancel()
        service.engine.lose()
        if final:
            service.lifecycle.lose_engine(cause)
            service.engine.fail_all(engine_dead(cause))
            return
        service.lifecycle.wait_for_engine()
        if settings.on_engine_failure == "fail":
            service.engine.fail_all(engine_dead(cause))
        elif self._giving_up is None:
            self._giving_up = asyncio.get_running_loop().call_later(
                settings.recovery_timeout, self._give_up, cause
            )

    def _give_up(self, cause: str) -> None:
        self._giving_up = None
        self._service.engine.fail_lost(engine_dead(cause))

    def _resubmit(self, requests: tuple[int, ...] | None) -> None:
        self._service.engine.resubmit(requests)
        if requests is None:
            if self._giving_up is not None:
                self._giving_up.cancel()
                self._giving_up = None
            self._serving = self._begin(self._serve_again(), "serve again")

    def _tell_passed(self, numbers: list[int]) -> None:
        self._lifeline.send(Passed(tuple(numbers)))

    async def _drain(self, delay: float, timeout: float) -> None:
        service = self._service
        service.lifecycle.retire()
        await asyncio.sleep(delay)
        service.lifecycle.refuse()
        unfinished = 0
        try:
            await asyncio.wait_for(service.lifecycle.idle(), timeout)
        except TimeoutError:
            unfinished = service.lifecycle.answers
            service.engine.fail_all(shutting_down())
            try:
                await asyncio.wait_for(service.lifecycle.idle(), _LAST_WORDS_S)
            except TimeoutError:
                log.info("%d clients do not read their last words", service.lifecycle.answers)
        self._lifeline.send(Drained(unfinished))
