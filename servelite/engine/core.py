"""The engine's loop: take messages, schedule, run, take results in, publish. One thread, all of it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from servelite.engine.admission import Admission
from servelite.engine.invariants import InvariantError
from servelite.engine.mailbox import ClientGone, Event, Mailbox
from servelite.engine.outbox import Outbox
from servelite.engine.scheduler import Scheduler
from servelite.executor.base import Executor, InFlight
from servelite.ipc.messages import NUMBER, Abort, Add, Load, RequestError, Stop, unpack
from servelite.ipc.progress import ProgressPage
from servelite.worker.base import StepFailedError

log = logging.getLogger(__name__)

QUEUE_FULL = RequestError(
    503, "queue_full", "too many requests or prompt tokens are waiting; try again later"
)


class EngineCore:
    """Drives one scheduler and one executor; at most `depth` steps are in flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        admission: Admission,
        executor: Executor,
        mailbox: Mailbox,
        outbox: Outbox,
        progress: ProgressPage,
        *,
        depth: int,
        check: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._requests = scheduler, scheduler.requests
        self._admission, self._executor = admission, executor
        self._mailbox, self._outbox, self._progress = mailbox, outbox, progress
        self._depth, self._check, self._clock = depth, check, clock
        self._in_flight: deque[InFlight] = deque()
        self._published = Load()
        self._known_clients: list[int] = []
        self._serving = True

    def run(self) -> None:
        """Serve until told to stop."""
        while self._serving:
            self.iterate()

    def iterate(self) -> None:
        """One turn of the loop."""
        scheduler, requests, executor = self._scheduler, self._requests, self._executor
        in_flight = self._in_flight
        self._take_messages(block=not in_flight and requests.idle)
        plan = scheduler.schedule()
        if plan is None and not in_flight and not requests.idle:
            raise InvariantError("requests wait, nothing is in flight, and nothing can be scheduled")
        if plan is not None:
            self._progress.start_step(plan.step, *scheduler.in_step(plan))
            step = executor.forward(plan)
            while plan.needs_masks and in_flight:  # the grammars' rows wait here, not before the forward pass
                self._complete(in_flight.popleft())
            executor.sample(step, scheduler.masks(plan) if plan.needs_masks else None)
            in_flight.append(step)
        while in_flight and (len(in_flight) >= self._depth or plan is None):
            self._complete(in_flight.popleft())
        self._publish()

    def _complete(self, step: InFlight) -> None:
        try:
            result = step.result()
        except StepFailedError as error:
            if step.plan.step > self._scheduler.void_to:
                self._void(step, error)
        else:
            self._scheduler.update(step.plan, result)
            self._progress.complete_step(step.plan.step)
        if self._check:
            self._requests.check()

    def _void(self, failed: InFlight, error: StepFailedError) -> None:
        """A step gave nothing: those after it computed on what it should have written."""
        log.error("step %d failed: %s", failed.plan.step, error)
        last = failed.plan.step
        while self._in_flight:
            step = self._in_flight.popleft()
            last = step.plan.step
            try:
                step.result()
            except Exception as later:
                log.error("step %d, after it: %s", last, later)
        self._scheduler.void_steps(failed.plan.step)
        self._progress.complete_step(last)

    def _take_messages(self, *, block: bool) -> None:
        timeout: float | None = 0.0
        if block and self._requests.grammars.pending:
            self._requests.grammars.wait()
        elif block:
            deadline = self._requests.next_deadline()
            timeout = None if deadline is None else max(0.0, deadline - self._clock())
        for client, event in self._mailbox.receive(timeout):
            self._handle(client, event)

    def _handle(self, client: int, event: Event) -> None:
        match event:
            case Add():
                self._add(client, event)
            case Abort():
                for number in unpack(event.requests, NUMBER).tolist():
                    self._requests.abort((client, number))
            case ClientGone():
                self._requests.abort_client(client)
            case Stop():
                self._stop()

    def _add(self, client: int, add: Add) -> None:
        if self._requests.find((client, add.request)) is not None:
            return  # a duplicate
        request = self._admission.request_of(client, add, self._clock())
        # What a dead engine had accepted is not refused by its successor.
        if not isinstance(request, RequestError) and not add.attempt and self._requests.queue_is_full(add):
            request = QUEUE_FULL
        if isinstance(request, RequestError):
            self._outbox.add_error(client, add.request, request)
        else:
            self._requests.add(request)

    def _stop(self) -> None:
        self._serving = False
        while self._in_flight:
            self._complete(self._in_flight.popleft())
        self._requests.shut_down()
        self._requests.grammars.close()

    def _publish(self) -> None:
        """One message to each front end that has something, or whose knowledge of the load is old."""
        load, step = self._scheduler.load(), self._requests.totals.steps
        messages = self._outbox.take(step, load)
        clients = self._mailbox.clients()
        if load != self._published or clients != self._known_clients:
            for client in clients:
                messages.setdefault(client, self._outbox.load_only(step, load))
            self._published, self._known_clients = load, clients
        for client, outputs in messages.items():
            self._mailbox.send(client, outputs)
