"""How waiting and running requests are ranked; one small pure object each."""

from __future__ import annotations

from servelite.engine.policies.base import Policy
from servelite.engine.policies.fcfs import FirstComeFirstServed
from servelite.engine.policies.priority import ByPriority

_POLICIES: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed, "priority": ByPriority}


def make_policy(name: str) -> Policy:
    """The policy that `--scheduling-policy` names."""
    return _POLICIES[name]()
