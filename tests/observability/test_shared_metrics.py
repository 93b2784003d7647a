"""Metrics of several processes that add up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servelite.observability.metrics import Metrics


def process(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    """The metrics of a process of that number."""
    monkeypatch.setattr(os, "getpid", lambda: number)
    metrics = Metrics("demo")
    metrics.exchange = metrics.share(folder)  # type: ignore[attr-defined]
    return metrics


def test_counters_and_histograms_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (process(tmp_path, number, monkeypatch) for number in (1, 2))
    for metrics, count in ((one, 3), (two, 4)):
        for _ in range(count):
            metrics.finished("stop")
        metrics.prompt_tokens.inc(10 * count)
        metrics.inter_token_latency.observe(0.03)
        metrics.e2e_latency.observe(7.0)
    two.finished("length")
    two.exchange.publish()  # type: ignore[attr-defined]
    text = one.expose().decode()
    for line in (
        'servelite_request_success_total{finished_reason="stop",model_name="demo"} 7.0',
        'servelite_request_success_total{finished_reason="length",model_name="demo"} 1.0',
        'servelite_prompt_tokens_total{model_name="demo"} 70.0',
        'servelite_inter_token_latency_seconds_bucket{le="0.04",model_name="demo"} 2.0',
        'servelite_inter_token_latency_seconds_sum{model_name="demo"} 0.06',
        'servelite_e2e_request_latency_seconds_count{model_name="demo"} 2.0',
    ):
        assert text.count(line + "\n") == 1, line
    assert text.count("# TYPE servelite_request_success_total counter") == 1


def test_what_a_dead_process_has_counted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = process(tmp_path, 1, monkeypatch)
    dead.finished("stop")
    dead.exchange.publish()  # type: ignore[attr-defined]
    successor = process(tmp_path, 2, monkeypatch)
    successor.finished("stop")
    successor.exchange.publish()  # type: ignore[attr-defined]
    assert (
        b'servelite_request_success_total{finished_reason="stop",model_name="demo"} 2.0' in successor.expose()
    )


def test_what_a_scrape_has_told_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = process(tmp_path, 1, monkeypatch)
    dead.finished("stop")
    line = b'servelite_request_success_total{finished_reason="stop",model_name="demo"} 1.0'
    assert line in dead.expose()  # and it dies within the second
    assert line in process(tmp_path, 2, monkeypatch).expose()


def test_nothing_is_written_where_nothing_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = process(tmp_path, 1, monkeypatch)
    metrics.exchange.publish()  # type: ignore[attr-defined]
    (file,) = tmp_path.iterdir()
    before = file.stat()
    metrics.exchange.publish()  # type: ignore[attr-defined]
    assert file.stat().st_ino == before.st_ino and file.stat().st_mtime_ns == before.st_mtime_ns
    metrics.finished("stop")
    metrics.exchange.publish()  # type: ignore[attr-defined]
    assert file.stat().st_ino != before.st_ino
