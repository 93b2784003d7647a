"""A front end process: opens the model's metadata, serves HTTP, obeys the launcher."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from typing import Final

import uvloop

from servelite.config import Settings
from servelite.frontend.app import make_app
from servelite.frontend.errors import engine_dead, shutting_down
from servelite.frontend.http_server import HTTPServer
from servelite.frontend.model_metadata import read_metadata
from servelite.frontend.service import Service
from servelite.ipc.lifeline import Lifeline
from servelite.ipc.messages import Boot, ChildReady, Drain, Drained, EngineDown, Stop, ToChild
from servelite.ipc.process import usable_cpus
from servelite.ipc.progress import ProgressPage
from servelite.observability.logs import configure_logs

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
        self._server = HTTPServer(make_app(service), service.settings.timeout_keep_alive)
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until Stop; a task that fails ends the process with its exception."""
        asyncio.get_running_loop().add_reader(self._lifeline.fileno(), self._obey)
        listener = socket.socket(fileno=self._boot.listen_fd)
        reader = asyncio.create_task(
            self._service.engine.run(self._boot.engine_address, self._boot.epoch), name="engine reader"
        )
        ready = asyncio.create_task(self._announce(), name="announce")
        server = asyncio.create_task(self._server.run_on(listener), name="http")
        try:
            pending = {reader, ready, server}
            while server in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            reader.cancel()
            ready.cancel()
            self._service.close()
            await asyncio.gather(reader, ready, return_exceptions=True)

    async def _announce(self) -> None:
        """Open the door once the engine is ready, and tell the launcher."""
        await self._server.listening()
        await self._service.engine.ready()
        self._service.lifecycle.serve()
        self._lifeline.send(ChildReady())

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
            case EngineDown(_, cause):
                self._service.lifecycle.lose_engine(cause)
                self._service.engine.fail_all(engine_dead(cause))
            case _:
                log.warning(
                    "a control message that this front end does not act on: %s", type(message).__name__
                )

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
