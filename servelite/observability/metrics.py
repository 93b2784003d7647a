"""The metrics of `/metrics`: vLLM's names with our prefix, in a registry of their own.

What the engine counts comes with every step's `Load`; a scrape reads the last one, so that a step
costs one assignment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servelite.ipc.messages import Load, Ready
from servelite.observability.shared_metrics import MetricsExchange

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_LONG_SECONDS: Final = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
)  # fmt: skip

_GAUGES: Final = (
    ("num_requests_running", "Requests that have a row in the engine's batch.", "running"),
    ("num_requests_waiting", "Requests in the engine's queue.", "waiting"),
    ("num_tokens_waiting", "Prompt tokens in the engine's queue.", "waiting_tokens"),
    ("kv_blocks_free", "KV blocks that no request holds.", "free_blocks"),
)
_COUNTERS: Final = (
    ("engine_steps", "Steps the engine has run.", "steps"),
    ("scheduled_tokens", "Tokens computed in all steps.", "scheduled_tokens"),
    ("num_preemptions", "Requests that lost their blocks to others.", "preemptions"),
    ("recomputed_tokens", "Tokens computed again after a preemption.", "recomputed_tokens"),
    ("requests_aborted", "Requests ended because their client was gone or had enough.", "aborted"),
    ("corrupted_requests", "Requests ended because their logits were not finite.", "corrupted"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
)


class EngineState(Collector):
    """The engine's last word about itself, as metrics."""

    def __init__(self) -> None:
        self.load = Load()
        self.facts: Ready | None = None
        self._earlier = dict.fromkeys((attribute for _, _, attribute in _COUNTERS), 0)

    def take_ready(self, ready: Ready) -> None:
        """A fresh engine: nothing has run, all its blocks are free. What its forerunners counted stays."""
        if self.facts is not None:
            for attribute in self._earlier:
                self._earlier[attribute] += getattr(self.load, attribute)
        self.facts = ready
        self.load = Load(free_blocks=ready.num_blocks)

    def collect(self) -> Iterator[Metric]:
        """All gauges and counters that the engine's messages carry."""
        for name, text, attribute in _GAUGES:
            yield GaugeMetricFamily(f"servelite_{name}", text, value=getattr(self.load, attribute))
        for name, text, attribute in _COUNTERS:
            value = self._earlier[attribute] + getattr(self.load, attribute)
            yield CounterMetricFamily(f"servelite_{name}", text, value=value)
        lives = self.facts.epoch if self.facts else 0  # a front end may be younger than the engine
        yield CounterMetricFamily(
            "servelite_engine_restarts", "Engines that took the place of a dead one.", value=lives
        )
        total = self.facts.num_blocks if self.facts else 0
        used = (total - self.load.free_blocks) / total if total else 0.0
        yield GaugeMetricFamily("servelite_kv_blocks_total", "KV blocks in the pool.", value=total)
        yield GaugeMetricFamily(
            "servelite_kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", value=used
        )
        phases = GaugeMetricFamily(
            "servelite_startup_seconds",
            "Seconds that each phase of the engine's start took.",
            labels=["phase"],
        )
        for phase, seconds in self.facts.ledger if self.facts else ():
            phases.add_metric([phase], seconds)
        yield phases


class TokenHistogram(Collector):
    """A histogram that is observed once a token: a third of the cost of the library's own."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The histogram, its buckets cumulative."""
        family = HistogramMetricFamily(self._name, self._text)
        bounds = [*map(str, self._bounds), "+Inf"]
        family.add_metric([], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class OfModel(Collector):
    """What registries hold, each sample with the name of the model, as vLLM's have it."""

    def __init__(self, model_name: str, *registries: CollectorRegistry) -> None:
        self._label, self._registries = {"model_name": model_name}, registries

    def collect(self) -> Iterator[Metric]:
        """Their families."""
        for family in chain.from_iterable(registry.collect() for registry in self._registries):
            family.samples = [
                sample._replace(labels=sample.labels | self._label) for sample in family.samples
            ]
            yield family


class Metrics:
    """One front end's metrics. Updated on its event loop only."""

    def __init__(self, model_name: str) -> None:
        """`model_name`: the first of those that the model is served by."""
        self._model_name = model_name
        self._registry = CollectorRegistry(auto_describe=False)
        """Of this front end alone."""
        self._exposed = CollectorRegistry(auto_describe=False)
        self.engine = EngineState()
        self._exposed.register(self.engine)
        self._exchange: MetricsExchange | None = None
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens the engine has produced.")
        self._success = self._counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self._refused = self._counter(
            "requests_refused", "Requests answered with an error, by reason.", "reason"
        )
        self.resumed = self._counter("requests_resumed", "Requests taken over by a new engine.")
        self.quarantined = self._counter("requests_quarantined", "Requests under which the engine died.")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's acceptance to its first token.", _SECONDS
        )
        self.inter_token_latency = TokenHistogram(
            "servelite_inter_token_latency_seconds", "Between consecutive tokens of a request.", _SECONDS
        )
        self._registry.register(self.inter_token_latency)
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's acceptance to its last token.", _LONG_SECONDS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "What a request waited for its first step.", _LONG_SECONDS
        )

    def finished(self, reason: str) -> None:
        """Count a request that was accepted and has ended: stop, length, abort or error."""
        self._success.labels(finished_reason=reason).inc()

    def refused(self, reason: str) -> None:
        """Count a request that was answered with an error of that code."""
        self._refused.labels(reason=reason).inc()

    def share(self, folder: Path) -> MetricsExchange:
        """From now on add up with the front ends that use the same folder."""
        self._exchange = MetricsExchange(folder, self._registry)
        self._exposed.register(self._exchange)
        return self._exchange

    def expose(self) -> bytes:
        """The text of `/metrics`."""
        own = () if self._exchange else (self._registry,)
        return generate_latest(OfModel(self._model_name, self._exposed, *own))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"servelite_{name}", text, labelnames=labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"servelite_{name}", text, buckets=buckets, registry=self._registry)
