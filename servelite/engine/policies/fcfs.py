"""First come, first served: one class, in order of arrival."""

from __future__ import annotations

from servelite.engine.request import Request


class FirstComeFirstServed:
    """The default policy."""

    def rank(self, request: Request, arrival: int) -> tuple[int, int]:
        """See `Policy.rank`."""
        return 0, arrival
