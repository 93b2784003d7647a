"""Where each request is: from its Add to its end, by the table of `ipc.states`.

Owns every request the engine knows, the waiting queue, the rows and the running order. What ends or
is preempted keeps its row and blocks until its last submitted step has completed.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from servelite.engine.grammars import RequestGrammars
from servelite.engine.invariants import InvariantError
from servelite.engine.kv_cache import KVCacheManager
from servelite.engine.outbox import Outbox
from servelite.engine.policies.base import Policy
from servelite.engine.request import Request, RowTable, WaitingOn
from servelite.engine.waiting import WaitingQueue
from servelite.ipc.messages import TOKEN, Add, RequestError
from servelite.ipc.states import State

DEADLINE_EXCEEDED: Final = RequestError(
    503, "deadline_exceeded", "the request's deadline passed while it waited"
)
SHUTTING_DOWN: Final = RequestError(503, "server_shutting_down", "the server is shutting down")


@dataclass
class Totals:
    """Counters since the engine's start, named as in `Load`."""

    steps: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    aborted: int = 0
    corrupted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True)
class WaitingLimits:
    """What may wait at the most."""

    requests: int
    tokens: int


class RequestLifecycle:
    """Every request the engine knows, and where it is."""

    def __init__(
        self,
        rows: RowTable,
        limits: WaitingLimits,
        kv: KVCacheManager,
        policy: Policy,
        outbox: Outbox,
        grammars: RequestGrammars,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows, self.grammars, self.clock = rows, grammars, clock
        self.waiting = WaitingQueue()
        self.totals = Totals()
        self.order: list[int] = []  # the running rows, by rank
        self.new_rows: list[Request] = []  # seated since the last plan
        self.freeing = 0  # blocks held only by steps in flight
        self._limits, self._kv, self._policy, self._outbox = limits, kv, policy, outbox
        self._requests: dict[tuple[int, int], Request] = {}
        self._followers: dict[tuple[int, int], list[Request]] = {}  # parked, by the key they wait for
        self._compiling: dict[tuple[int, int], Request] = {}  # parked, until their grammar is compiled
        self._arrivals = 0
        self._deadlines = 0  # requests in the queue or parked that have one

    def add(self, request: Request) -> None:
        """Queue a request that the engine can serve. A duplicate is ignored."""
        if request.key in self._requests:
            return
        request.rank = self._policy.rank(request, self._arrivals)
        self._arrivals += 1
        self._requests[request.key] = request
        self._deadlines += request.deadline is not None
        leader = self._requests.get((request.client, request.add.prefix_of))
        if leader is not None and leader.first_token is None and leader.state is not State.FINISHING:
            request.state, request.waiting_on = State.PARKED, WaitingOn.PREFIX
            self._followers.setdefault(leader.key, []).append(request)
        else:
            self._enqueue(request)

    def find(self, key: tuple[int, int]) -> Request | None:
        """The request, unless it is over or was never there."""
        return self._requests.get(key)

    def queue_is_full(self, add: Add) -> bool:
        """Whether the request would exceed what may wait (the front ends' own bound is tighter)."""
        queued = len(self.waiting) + self.num_parked()
        if queued >= self.rows.num_rows + self._limits.requests:
            return True
        if add.prefix_of >= 0:
            return False  # its prompt is another one's, and counted there
        tokens = self.waiting.num_tokens + len(add.prompt) // TOKEN.itemsize
        return queued > 0 and tokens > self._limits.tokens

    def abort(self, key: tuple[int, int]) -> None:
        """End a request nobody waits for, in whatever state it is. Idempotent."""
        request = self._requests.get(key)
        if request is not None and request.state is not State.FINISHING:
            self.totals.aborted += 1
            self.end(request)

    def abort_client(self, client: int) -> None:
        """End everything of a front end that is gone."""
        for key in [key for key in self._requests if key[0] == client]:
            self.abort(key)

    def shut_down(self) -> None:
        """End every request with an error. No step may be in flight."""
        for request in list(self._requests.values()):
            self.fail(request, SHUTTING_DOWN)

    def _enqueue(self, request: Request) -> None:
        if self.grammars.must_wait(request):
            request.state, request.waiting_on = State.PARKED, WaitingOn.GRAMMAR
            self._compiling[request.key] = request
            return
        request.state, request.waiting_on = State.WAITING, None
        self.waiting.push(request)

    def unpark_compiled(self) -> None:
        """Queue the requests whose grammar is ready, and end those whose grammar cannot be used."""
        for request, error in self.grammars.take():
            if error is not None:
                self.fail(request, error)
            else:
                del self._compiling[request.key]
                self._enqueue(request)

    def fail(self, request: Request, error: RequestError) -> None:
        """End a request with an error, unless it is over already."""
        if request.state is not State.FINISHING:
            self._outbox.add_error(request.client, request.add.request, error)
            self.end(request)

    def end(self, request: Request) -> None:
        """The request is over for its client; its blocks go now, or with its last step in flight."""
        self.unpark_followers(request)
        if request.row < 0:
            self.leave_queue(request)
            self._forget(request)
            return
        if request.state is not State.PREEMPTED:  # else it has left the running order already
            self._stop_running(request)
        request.state = State.FINISHING
        if self.rows.in_flight[request.row] == 0:
            self.release(request)

    def leave_queue(self, request: Request) -> None:
        """Take a request out of the queue or its parking place."""
        if request.waiting_on is WaitingOn.GRAMMAR:
            del self._compiling[request.key]
        elif request.state is State.PARKED:
            leader = (request.client, request.add.prefix_of)
            self._followers[leader].remove(request)
            if not self._followers[leader]:
                del self._followers[leader]
        else:
            self.waiting.drop(request)
        self._deadlines -= request.deadline is not None

    def _forget(self, request: Request) -> None:
        request.state = State.FINISHED
        del self._requests[request.key]

    def _stop_running(self, request: Request) -> None:
        self.rows.running[request.row] = False
        self.order.remove(request.row)
        self.freeing += self._kv.held(request.row)

    def release(self, request: Request) -> None:
        """Take row and blocks back: no step that touches them is in flight."""
        self.freeing -= self._kv.held(request.row)
        self._kv.free(request.row)
        self.rows.unseat(request)
        if request.state is State.PREEMPTED:
            # Stays PREEMPTED while it waits: its deadline counted only until its first admission.
            self.waiting.push(request)
            self._deadlines += request.deadline is not None
        else:
            self._forget(request)

    def unpark_followers(self, leader: Request) -> None:
        """What `leader` was waited for has come, or will not."""
        for request in self._followers.pop(leader.key, ()):
            self._enqueue(request)

    def preempt(self, row: int) -> None:
        """Take blocks and row from a running request; it computes again later."""
        request = self.at(row)
        request.preemptions += 1
        request.lost_tokens = int(self.rows.num_computed[row])
        self.totals.preemptions += 1
        self._stop_running(request)
        request.state = State.PREEMPTED
        # A placeholder of this step, if any, was never submitted; those of steps in flight arrive.
        if self.rows.in_flight[row] == 0:
            self.release(request)

    def seat(self, request: Request, cached: int) -> None:
        """Give a queued request a row; `cached` tokens of it are in the prefix cache."""
        row = self.rows.seat(request, cached)
        request.state, request.distrusted = State.RUNNING, False
        request.hit_blocks = cached // self._kv.block_size
        if request.admitted is None:
            request.admitted, request.cached_tokens = self.clock(), cached
            self.totals.prefix_queries += len(request.tokens)
            self.totals.prefix_hits += cached
        else:
            again = max(0, request.lost_tokens - cached)
            request.recomputed_tokens += again
            self.totals.recomputed_tokens += again
        bisect.insort(self.order, row, key=lambda other: self.at(other).rank)
        self.new_rows.append(request)

    def next_deadline(self) -> float | None:
        """When the first queued request expires, on the engine's clock."""
        return min((deadline for deadline, _ in self._may_expire()), default=None)

    def expire(self) -> None:
        """End what waits beyond its deadline."""
        for deadline, request in self._may_expire():
            if deadline <= self.clock():
                self.fail(request, DEADLINE_EXCEEDED)

    def _may_expire(self) -> list[tuple[float, Request]]:
        """The requests with a deadline that have never run; looked for only where there is one."""
        every = self._requests.values() if self._deadlines else ()
        queued = [r for r in every if r.state in (State.WAITING, State.PARKED) and r.admitted is None]
        return [(request.deadline, request) for request in queued if request.deadline is not None]

    @property
    def idle(self) -> bool:
        """Nothing runs or waits for a row (what is parked waits for something that runs, or a grammar)."""
        return not self.order and not len(self.waiting)

    def num_parked(self) -> int:
        """Requests that wait for something else than a row."""
        return sum(len(followers) for followers in self._followers.values()) + len(self._compiling)

    def at(self, row: int) -> Request:
        """The request that has the row."""
        request = self.rows.requests[row]
        if request is None:
            raise InvariantError(f"row {row} has no request")
        return request

    def check(self) -> None:
        """Raise InvariantError unless every book agrees with every other. Tests and --debug only."""
        self._kv.check()
        columns = self.rows
        seated = [row for row, request in enumerate(columns.requests) if request is not None]
        if sorted(seated + columns.free) != list(range(columns.num_rows)):
            raise InvariantError("a row is neither free nor seated, or both")
        if sorted(self.order) != np.flatnonzero(columns.running).tolist():
            raise InvariantError("the running order and the running column differ")
        if [self.at(row).rank for row in self.order] != sorted(self.at(row).rank for row in self.order):
            raise InvariantError("the running order is not by rank")
        for row in columns.free:
            if self._kv.held(row) or columns.in_flight[row]:
                raise InvariantError(f"free row {row} holds blocks or is in flight")
        held = sum(self._kv.held(row) for row in seated if not columns.running[row])
        if held != self.freeing:
            raise InvariantError(f"{held} blocks are on their way back, {self.freeing} counted")
        for request in self._requests.values():
            if (request.row >= 0) != (request.key in {self.at(row).key for row in seated}):
                raise InvariantError(f"request {request.key} is {request.state} and has row {request.row}")
