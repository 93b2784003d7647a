"""Exact percentiles: every sample is kept, and a percentile is one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The least of the samples that at least `percent` % of them do not exceed (nearest rank).

    Args:
        ordered: samples in ascending order, at least one.
        percent: 1 to 100.
    """
    return ordered[-(-percent * len(ordered) // 100) - 1]


@dataclass(frozen=True)
class Distribution:
    """What is told of many samples of one quantity, in its unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Distribution | None:
        """None where there are no samples."""
        ordered = sorted(samples)
        if not ordered:
            return None
        p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])
