"""The waiting queue: a heap by rank, from which any request can be dropped."""

from __future__ import annotations

import heapq

from servelite.engine.request import Request


class WaitingQueue:
    """Requests by rank, lowest first.

    Dropped ones stay in the heap as tombstones, about as many as live ones at the most.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        self._live: dict[tuple[int, int], Request] = {}
        self._pushes = 0
        self.num_tokens = 0
        """Tokens that would have to be computed, over all that wait."""

    def __len__(self) -> int:
        return len(self._live)

    def push(self, request: Request) -> None:
        """Add a request; its key must not be in the queue."""
        self._pushes += 1
        heapq.heappush(self._heap, (request.rank, self._pushes, request))
        self._live[request.key] = request
        self.num_tokens += len(request.tokens)

    def peek(self) -> Request | None:
        """The first-ranked request."""
        while self._heap and self._live.get(self._heap[0][2].key) is not self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def drop(self, request: Request) -> None:
        """Remove a request that is in the queue."""
        del self._live[request.key]
        self.num_tokens -= len(request.tokens)
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2].key) is entry[2]]
            heapq.heapify(self._heap)
