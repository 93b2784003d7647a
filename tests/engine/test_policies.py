"""Policies alone: ranks of requests, without an engine."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from servelite.config import Settings
from servelite.engine.policies import POLICIES, make_policy
from servelite.engine.request import Request
from servelite.ipc.messages import Add, SamplingParams, pack


def request(number: int, *, priority: int = 0, length: int = 4) -> Request:
    add = Add(number, pack([1] * length), SamplingParams(max_tokens=3), seed=0, priority=priority)
    return Request(0, add, np.ones(length, np.int32), length, arrived=0.0)


def ranked(policy: str, requests: list[Request]) -> list[int]:
    """The requests' numbers in the order in which they run."""
    made = make_policy(policy)
    ranks = {each.add.request: made.rank(each, arrival) for arrival, each in enumerate(requests)}
    return sorted(ranks, key=ranks.__getitem__)


def test_first_come_first_served() -> None:
    requests = [request(5, priority=9), request(3), request(4, length=100)]
    assert ranked("fcfs", requests) == [5, 3, 4]
    policy = make_policy("fcfs")
    assert {policy.rank(each, arrival)[0] for arrival, each in enumerate(requests)} == {0}  # one class


def test_by_priority_and_then_in_order() -> None:
    requests = [request(1, priority=5), request(2, priority=-3), request(3, priority=5), request(4)]
    assert ranked("priority", requests) == [2, 4, 1, 3]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_two_ranks_are_equal(policy: str) -> None:
    made = make_policy(policy)
    ranks = [made.rank(request(n, priority=n % 3, length=1 + n % 5), n) for n in range(100)]
    assert len(set(ranks)) == 100


def test_the_setting_names_those_that_are_there() -> None:
    (field,) = (f for f in dataclasses.fields(Settings) if f.name == "scheduling_policy")
    assert set(field.metadata["choices"]) == set(POLICIES)
