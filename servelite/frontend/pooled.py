"""The vectors of one request: its prompts at the engine, some at a time, and what comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence

from servelite.frontend.admission import Place
from servelite.frontend.engine_client import EngineClient
from servelite.frontend.lifecycle import Lifecycle
from servelite.frontend.request import RequestRecord
from servelite.ipc.messages import TOKEN, Add, FinishReason


class Pooled:
    """Read `vectors` to its end. Always `close` it.

    As many prompts are at the engine as the request has places, and each that ends makes room for the next:
    a thousand of them run in batches, and nobody else's request is kept out.

    Attributes:
        records: of the prompts at the engine, in order.
        prompt_tokens: of all prompts.
    """

    def __init__(
        self,
        engine: EngineClient,
        lifecycle: Lifecycle,
        adds: Sequence[Add],
        places: list[Place],
        most_tokens: int,
    ) -> None:
        """
        Args:
            places: held until `close`.
            most_tokens: of prompts at the engine at once, unless one alone has more.
        """
        self.records: deque[RequestRecord] = deque()
        self.prompt_tokens = sum(len(add.prompt) for add in adds) // TOKEN.itemsize
        self._engine, self._lifecycle = engine, lifecycle
        self._adds, self._places, self._most_tokens = adds, places, most_tokens
        self._tokens = 0  # of the prompts at the engine

    async def vectors(self) -> AsyncIterator[bytes]:
        """Each prompt's vector, float32, in order.

        Raises:
            ClientGone: the client closed the connection.
            APIError: the engine refused or lost a prompt.
        """
        for add in self._adds:
            while self.records and not self._has_room_for(add):
                yield await self._first()
            if self._lifecycle.state == "engine dead":  # nothing would ever end what is submitted now
                self._lifecycle.check()
            record = self._engine.submit(add, Place(None))
            self._tokens += record.prompt_tokens
            self.records.append(record)
        while self.records:
            yield await self._first()

    def _has_room_for(self, add: Add) -> bool:
        tokens = self._tokens + len(add.prompt) // TOKEN.itemsize
        return len(self.records) < len(self._places) and tokens <= self._most_tokens

    async def _first(self) -> bytes:
        record = self.records[0]
        while record.finish is FinishReason.NONE:
            if not record.has_news:
                await record.news()
            record.take()
        self.records.popleft()
        self._tokens -= record.prompt_tokens
        return record.vector

    def close(self) -> None:
        """Whoever read the vectors is done with them: the engine stops if it has not."""
        for record in self.records:
            self._engine.abort(record, "abort")
        for place in self._places:
            place.leave()
