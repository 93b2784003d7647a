"""How waiting and running requests are ranked; one small pure object each."""

from __future__ import annotations

from typing import Final

from servelite.engine.policies.base import Policy
from servelite.engine.policies.fcfs import FirstComeFirstServed
from servelite.engine.policies.priority import ByPriority

POLICIES: Final[dict[str, type[Policy]]] = {"fcfs": FirstComeFirstServed, "priority": ByPriority}
"""By the name that `--scheduling-policy` has for it; `config.py` lists the same."""


def make_policy(name: str) -> Policy:
    """The policy that `--scheduling-policy` names."""
    return POLICIES[name]()
