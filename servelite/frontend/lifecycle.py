"""What a front end is doing: loading, serving, waiting for a new engine, draining, or left without one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Final

from servelite.frontend.errors import (
    APIError,
    body_timeout,
    engine_dead,
    not_ready,
    recovering,
    shutting_down,
)

BODY_S: Final = 60.0  # for a request's body, from its headers to its last byte


class Lifecycle:
    """Decides whether a request may come in, and knows when the last answer has left."""

    def __init__(self) -> None:
        self.state = "loading"
        self._engine: APIError | None = not_ready()  # why the engine takes no requests
        self._drain: APIError | None = None  # why nobody does any more
        self._answers = 0
        self._arriving: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether a token could be produced now: what `/health/ready` says."""
        return self.state == "ready"

    @property
    def answers(self) -> int:
        """Answers whose last byte has not been handed to the connection."""
        return self._answers

    def serve(self) -> None:
        """The engine is ready."""
        self._engine = None
        if self.state != "draining":
            self.state = "ready"

    def retire(self) -> None:
        """Draining has begun: balancers are told, requests are still taken."""
        self.state = "draining"

    def refuse(self) -> None:
        """From now on new requests get a 503."""
        self.state = "draining"
        self._drain = shutting_down()
        self._end_arriving()

    def stall(self, stalled: bool) -> None:
        """The engine does not move, or does again: balancers are told, requests are still taken."""
        if self.state in ("ready", "stalled"):
            self.state = "stalled" if stalled else "ready"

    def wait_for_engine(self) -> None:
        """The engine is dead, another is on its way: new requests get a 503 until it is there."""
        self._engine = recovering()
        if self.state != "draining":
            self.state = "recovering"
        self._end_arriving()

    def lose_engine(self, cause: str) -> None:
        """The engine is dead, and no other will come."""
        self.state = "engine dead"
        self._engine = engine_dead(cause)
        self._end_arriving()

    def check(self) -> None:
        """Raises `APIError` (503) unless a request may come in now."""
        refusal = self._engine or self._drain
        if refusal is not None:
            raise refusal.with_traceback(None)  # raised again and again: frames must not pile up

    async def arrival(self, body: Awaitable[bytes]) -> bytes:
        """A request's body, while requests are taken and it comes in time.

        Raises:
            APIError: 408, it took too long; 503, requests are no longer taken.
        """
        timeout = asyncio.timeout(BODY_S)
        try:
            async with timeout:
                self._arriving.add(timeout)
                return await body
        except TimeoutError:
            pass  # which of the two, is said below
        finally:
            self._arriving.discard(timeout)
        self.check()
        raise body_timeout(BODY_S)

    def _end_arriving(self) -> None:
        """Their requests get the refusal now: nobody can say whether the rest of a body will ever come."""
        for timeout in self._arriving:
            if not timeout.expired():
                timeout.reschedule(0.0)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around one answer, from its acceptance to its last byte."""
        self._answers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._answers -= 1
            if self._answers == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Until no answer is under way."""
        await self._idle.wait()
