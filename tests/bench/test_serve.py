"""The load client against a server that does what it is told."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from servelite.bench.load import Amount, Level
from servelite.bench.prompts import WORDS, Lengths
from servelite.bench.serve import ServeOptions, prepare, run_load
from servelite.bench.serve_report import LevelReport, level_text, summary_text
from servelite.bench.target import BenchError
from tests.bench.fake_server import DONE, Script, event, fake_server, usage, words


def options(url: str, **changes: Any) -> ServeOptions:
    given: dict[str, Any] = {
        "url": url, "levels": [Level(streams=2)], "amount": Amount(requests=6), "prompt": Lengths(20, 20),
        "output": Lengths(5, 5), "seed": 1, "warm_up": 0, "timeout": 20.0,
    }  # fmt: skip
    return ServeOptions(**(given | changes))


def measure(script: Script, **changes: Any) -> list[LevelReport]:
    reports: list[LevelReport] = []
    with fake_server(script) as url:
        asked = options(url, **changes)
        assert run_load(asked, prepare(asked), reports.append)
    return reports


def test_counts_are_exact() -> None:
    script = Script(words)
    (report,) = measure(script)
    assert (report.completed, report.failed, report.unfinished, report.short) == (6, 0, 0, 0)
    assert (report.prompt_tokens, report.output_tokens, report.tokens_per_chunk) == (6 * 20, 6 * 5, 1.0)
    assert not report.tokens_estimated and not report.any_failed and report.errors == {}
    assert report.ttft_ms and report.e2e_ms and report.itl_ms and report.tpot_ms
    assert (report.ttft_ms.count, report.itl_ms.count, report.tpot_ms.count) == (6, 6 * 4, 6)
    assert report.output_tokens_per_s == pytest.approx(30 / report.seconds)
    assert report.total_tokens_per_s == pytest.approx(150 / report.seconds)
    body = script.bodies[0]
    assert (body["model"], body["stream"], body["ignore_eos"], body["temperature"]) == ("fake", True, True, 0)
    assert body["stream_options"] == {"include_usage": True} and body["max_tokens"] == 5


def test_times_are_those_of_the_chunks() -> None:
    def slow(body: dict[str, Any], _: int) -> Iterator[str | float]:
        yield ": a comment\n\n" + event("")  # no content: no token yet
        yield 0.1
        yield event("one") + event("two")  # read at once: no time between them
        yield 0.2
        yield event("three", "length") + usage(7, 5, cached=4)
        yield 0.1
        yield DONE

    (report,) = measure(Script(slow), levels=[Level(streams=1)], amount=Amount(requests=1))
    assert report.ttft_ms and report.itl_ms and report.tpot_ms and report.e2e_ms
    assert 99 < report.ttft_ms.max < 500
    assert (report.itl_ms.count, report.itl_ms.p50) == (2, 0.0) and 199 < report.itl_ms.max < 1000
    assert report.tpot_ms.max == pytest.approx(report.itl_ms.max / 4)
    assert 399 < report.e2e_ms.max < 2000
    assert (report.output_tokens, report.cached_tokens) == (5, 4)
    assert report.tokens_per_chunk == pytest.approx(5 / 3)


def test_chat_is_asked_as_chat() -> None:
    def answer(body: dict[str, Any], _: int) -> Iterator[str | float]:
        for delta in ({"role": "assistant", "content": ""}, {"content": "a"}, {"reasoning_content": "b"}, {}):
            yield event(choices=[{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}])
        yield DONE

    script = Script(answer)
    changes: dict[str, Any] = {"chat": True, "model": "given", "api_key": "k", "fields": {"ignore_eos": None}}
    (report,) = measure(script, **changes)
    assert (report.completed, report.output_tokens, report.tokens_estimated) == (6, 12, True)
    assert report.short == 6  # two tokens of five
    (message,) = script.bodies[0]["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 20
    assert script.bodies[0]["model"] == "given" and "ignore_eos" not in script.bodies[0]
    assert script.headers[0]["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([event("a"), event(error={"message": "it\nbroke"})], "it broke"),
        ([event("a")], "the stream ended before its end"),
        ([], "the stream ended before its end"),
        (["data: {\n\n"], "a chunk that is none of OpenAI's"),
        ([event("a"), 5.0], "no end within --timeout 0.5 s"),
    ],
)
def test_a_stream_that_fails_is_counted(pieces: list[str | float], error: str) -> None:
    def answer(body: dict[str, Any], number: int) -> Iterator[str | float]:
        yield from pieces if number == 2 else words(body)

    (report,) = measure(Script(answer), amount=Amount(requests=4), timeout=0.5)
    assert (report.completed, report.failed, report.any_failed) == (3, 1, True)
    ((told, times),) = report.errors.items()
    assert error in told and times == 1
    assert f"failed 1 x: {told}" in level_text(report)
    assert report.output_tokens == 15  # of those that completed


def test_refusals_are_counted_by_what_they_say() -> None:
    (report,) = measure(Script(words, statuses={1: 503, 3: 400, 4: 503}))
    assert (report.completed, report.failed) == (3, 3)
    assert report.errors == {
        "status 503: no to request 1": 1, "status 400: no to request 3": 1, "status 503: no to request 4": 1
    }  # fmt: skip


def test_a_server_that_is_gone_is_counted() -> None:
    with fake_server(Script(words)) as url:
        asked = options(url)
        workload = prepare(asked)
    reports: list[LevelReport] = []
    assert run_load(asked, workload, reports.append)
    assert (reports[0].completed, reports[0].failed) == (0, 6)
    (error,) = reports[0].errors
    assert error.startswith("no connection: ")
    assert reports[0].ttft_ms is None and "-" in level_text(reports[0])
    assert len(summary_text([*reports, *reports]).splitlines()) == 4


def test_prompts_have_their_lengths_and_nothing_in_common() -> None:
    script = Script(words, prompt_tokens=lambda prompt: 2 * len(prompt.split()) + 10)
    measure(
        script, levels=[Level(streams=2), Level(streams=3)], amount=Amount(requests=20),
        prompt=Lengths(30, 60), output=Lengths(2, 4), warm_up=3, prefix=40,
    )  # fmt: skip
    assert len(script.bodies) == 43
    prompts = [body["prompt"].split() for body in script.bodies]
    assert all(set(prompt) <= set(WORDS) for prompt in prompts)
    assert {tuple(prompt[:20]) for prompt in prompts[3:]} == {tuple(prompts[3][:20])}  # 40 tokens
    assert not {tuple(prompt[:5]) for prompt in prompts[:3]} & {tuple(prompts[3][:5])}  # warm-up: none of it
    own = [tuple(prompt[20:]) for prompt in prompts[3:]]
    assert len({beginning[:5] for beginning in own}) == 40
    assert {len(prompt) for prompt in own} <= set(range(10, 26)) and len({len(p) for p in own}) > 5
    assert {body["max_tokens"] for body in script.bodies} == {2, 3, 4}


def test_the_seed_decides_the_prompts() -> None:
    scripts = [Script(words) for _ in range(3)]
    for script, seed in zip(scripts, (1, 1, 2), strict=True):
        measure(script, levels=[Level(streams=1)], seed=seed)
    assert scripts[0].bodies == scripts[1].bodies != scripts[2].bodies


def test_words_are_scaled_only_where_the_server_counts() -> None:
    script = Script(words, prompt_tokens=lambda prompt: None)
    measure(script, amount=Amount(requests=1))
    assert len(script.bodies[0]["prompt"].split()) == 20


def test_streams_at_once_and_arrivals() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def answer(body: dict[str, Any], _: int) -> Iterator[str | float]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        yield 0.3
        with lock:
            now -= 1
        yield from words(body)

    measure(Script(answer), levels=[Level(streams=3)], amount=Amount(requests=7))
    assert most == 3
    (report,) = measure(Script(answer), levels=[Level(rate=50.0)], amount=Amount(requests=20))
    assert most > 4  # 15 on average: nobody waits for an answer
    assert (report.completed, report.request_rate, report.streams) == (20, 50.0, 0)
    (report,) = measure(Script(answer), levels=[Level(streams=2)], amount=Amount(seconds=0.7))
    assert 2 <= report.completed <= 6 and report.seconds > 0.7


def test_a_long_prompt_beside_streams() -> None:
    arrived = threading.Event()

    def answer(body: dict[str, Any], number: int) -> Iterator[str | float]:
        if len(body["prompt"].split()) > 100:
            arrived.set()
            yield 0.3
            yield from words(body)
            return
        for _ in range(20):
            yield event("a")
            yield 0.005
        assert arrived.wait(20)
        yield 0.2  # the stall
        yield event("a", "length")
        yield usage(20, 21)
        yield DONE

    script = Script(answer)
    (report,) = measure(script, amount=Amount(requests=2), output=Lengths(21, 21), long_prompt=150)
    assert report.completed == 2 and report.long_prompt is not None
    long = report.long_prompt
    assert long.prompt_tokens == 150 and long.error == ""
    assert long.ttft_ms is not None and 299 < long.ttft_ms < 1500
    assert long.gaps_before_ms and long.gaps_during_ms
    assert long.gaps_during_ms.max > 199 and long.gaps_before_ms.p50 < 100
    assert "150 tokens" in level_text(report)


def test_an_interrupt_tells_what_was_measured() -> None:
    def endless(body: dict[str, Any], number: int) -> Iterator[str | float]:
        if number < 2:
            yield from words(body)
        while True:
            yield event("a")
            yield 0.02

    reports: list[LevelReport] = []
    with fake_server(Script(endless)) as url:
        asked = options(url, levels=[Level(streams=2), Level(streams=4)])
        workload = prepare(asked)
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        assert not run_load(asked, workload, reports.append)
        timer.join()
    assert time.monotonic() - began < 10
    (report,) = reports
    assert (report.completed, report.unfinished, report.failed) == (2, 2, 0)
    assert report.output_tokens > 10 + 10 and "2 unfinished" in level_text(report)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com", "no http:// address"),
        ("http://127.0.0.1:1", "no answer"),
        ("http://127.0.0.1:x", "--url http://127.0.0.1:x"),
        ("http://", "no http:// address"),
    ],
)
def test_what_cannot_be_reached_is_told_in_one_line(url: str, said: str) -> None:
    with pytest.raises(BenchError, match=re.escape(said)) as raised:
        prepare(options(url))
    assert "\n" not in str(raised.value)


def test_a_warm_up_that_fails_ends_the_run() -> None:
    with pytest.raises(BenchError, match="status 500: no to request 0"):
        measure(Script(words, statuses={0: 500}), warm_up=1)
