"""By the request's priority, lowest first; in order of arrival within one."""

from __future__ import annotations

from servelite.engine.request import Request


class ByPriority:
    """Each priority is a class of its own: under memory pressure the highest number yields first."""

    def rank(self, request: Request, arrival: int) -> tuple[int, int]:
        """See `Policy.rank`."""
        return request.add.priority, arrival
