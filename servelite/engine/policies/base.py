"""The interface of a scheduling policy."""

from __future__ import annotations

from typing import Protocol

from servelite.engine.request import Request


class Policy(Protocol):
    """Ranks requests; the scheduler runs the lowest rank first."""

    def rank(self, request: Request, arrival: int) -> tuple[int, int]:
        """(class, order) of a request, fixed at its arrival; no two requests have the same.

        Preemption takes its victim from the class that ranks last of those that run (the largest number).
        A preempted request keeps its rank, so that it is the first of its class to run again.

        Args:
            arrival: how many requests came before it.
        """
