"""Metrics of several front ends as one: each leaves its own in a file, and a scrape adds them up.

A file a process, written anew every second in which something was counted, and before a scrape: what a scrape
has told stays counted when a front end dies, and a scrape is at most a second behind the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_PREFIX: Final = "metrics-"
PERIOD_S: Final = 1.0


class _Sample(msgspec.Struct, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class _Family(msgspec.Struct, array_like=True):
    name: str
    text: str
    kind: str
    samples: list[_Sample]


_decoder = msgspec.msgpack.Decoder(list[_Family])


class MetricsExchange(Collector):
    """One front end's side."""

    def __init__(self, folder: Path, own: CollectorRegistry) -> None:
        """`own`: counters and histograms of this process alone."""
        self._folder, self._own = folder, own
        self._file = folder / f"{_PREFIX}{os.getpid()}"
        self._written = b""

    def publish(self) -> None:
        """Leave this process's metrics for the others, if they have changed."""
        encoded = msgspec.msgpack.encode(_families(self._own))
        if encoded != self._written:
            part = self._file.with_suffix(".part")
            part.write_bytes(encoded)
            os.replace(part, self._file)  # whoever reads sees all of it
            self._written = encoded

    def collect(self) -> Iterator[Metric]:
        """Everybody's metrics, summed by name and labels. This process's own are left first: a counter that
        fell when the process died would look like one that began anew."""
        self.publish()
        total: dict[str, _Family] = {family.name: family for family in _families(self._own)}
        for file in sorted(self._folder.glob(_PREFIX + "*")):
            if file != self._file and not file.suffix:
                _add(total, _decoder.decode(file.read_bytes()))
        for family in total.values():
            metric = Metric(family.name, family.text, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


def _families(registry: CollectorRegistry) -> list[_Family]:
    return [
        _Family(
            metric.name,
            metric.documentation,
            metric.type,
            [
                _Sample(sample.name, dict(sample.labels), sample.value)
                for sample in metric.samples
                if not sample.name.endswith("_created")  # a time stamp: no sum of these means anything
            ],
        )
        for metric in registry.collect()
    ]


def _add(total: dict[str, _Family], more: Iterable[_Family]) -> None:
    for family in more:
        into = total.setdefault(family.name, _Family(family.name, family.text, family.kind, []))
        known = {(sample.name, *sorted(sample.labels.items())): sample for sample in into.samples}
        for sample in family.samples:
            have = known.get((sample.name, *sorted(sample.labels.items())))
            if have is None:
                into.samples.append(sample)
            else:
                have.value += sample.value
