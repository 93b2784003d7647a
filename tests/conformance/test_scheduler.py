"""Scheduling: preemption changes no answer, and what can never fit stands in nobody's way."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conformance.answers import Answer
from tests.conformance.setups import (
    BLOCK_SIZE,
    PLAIN,
    PLAIN_UNCACHED,
    TINY,
    TINY_UNCACHED,
    Servers,
    Setup,
    pool_for,
)
from tests.conformance.target import COMPLETIONS, GREEDY, Target, together
from tests.conformance.test_usage import fresh_ids
from tests.http.server import end, start_server

TOKENS = 6 * BLOCK_SIZE
REQUEST_BLOCKS = (2 * BLOCK_SIZE + 1 + TOKENS + BLOCK_SIZE - 1) // BLOCK_SIZE


@dataclass
class Crowd:
    """Six requests, their answers alone, and a server with a pool for two and a half of them.

    The real one is small and random: what counts is a cache of real numbers, under real arithmetic.
    """

    bodies: list[dict[str, Any]]
    alone: dict[str, list[Answer]]
    crowded: Target


KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": {"temperature": 1},
    "stop": GREEDY | {"stop": ["~~~never~~~"]},
    "penalties": GREEDY | {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
}


@pytest.fixture(
    scope="module",
    params=[
        PLAIN,
        PLAIN_UNCACHED,
        *(pytest.param(of, marks=pytest.mark.slow) for of in (TINY, TINY_UNCACHED)),
    ],
    ids=lambda of: of.name,
)
def crowd(request: pytest.FixtureRequest, servers: Servers) -> Crowd:
    of: Setup = request.param
    more = {"ignore_eos": True, "return_token_ids": True} | ({"logprobs": 1} if of.real else {})
    bodies = [
        {"prompt": fresh_ids(2 * BLOCK_SIZE + 1, of.vocab), "max_tokens": TOKENS, "seed": number} | more
        for number in range(6)
    ]
    roomy = servers.own(of)
    alone = {
        kind: [roomy.plain(COMPLETIONS, body | fields) for body in bodies] for kind, fields in KINDS.items()
    }
    return Crowd(bodies, alone, servers.own(pool_for(5 * REQUEST_BLOCKS // 2, of)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(300)
def test_sch_01_preemption_does_not_change_the_answer(crowd: Crowd, kind: str) -> None:
    """SCH-01, plain and stream."""
    asked = [body | KINDS[kind] for body in crowd.bodies]
    for ask in (crowd.crowded.plain, crowd.crowded.stream):
        before = crowd.crowded.metric("num_preemptions_total")
        answers = together([lambda ask=ask, body=body: ask(COMPLETIONS, body) for body in asked])  # type: ignore[misc]
        assert crowd.crowded.metric("num_preemptions_total") > before
        for got, expected in zip(answers, crowd.alone[kind], strict=True):
            assert got.text == expected.text and got.finish_reason == expected.finish_reason == "length"
            assert got.counts == expected.counts
            (mine,), (theirs,) = got.choices, expected.choices
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs.get("token_logprobs", []) == pytest.approx(
                theirs.logprobs.get("token_logprobs", []), abs=1e-3
            )


def test_sch_01_preemption_under_a_grammar(crowd: Crowd) -> None:
    """SCH-01, with response_format: here on completions, by a regex that any model fills."""
    crowd.crowded.needs("structured_outputs")
    fields = {"structured_outputs": {"regex": "[a-z ]{300,400}"}} | GREEDY
    asked = [body | fields for body in crowd.bodies]
    alone = [crowd.crowded.plain(COMPLETIONS, body) for body in asked]
    for ask in (crowd.crowded.plain, crowd.crowded.stream):
        before = crowd.crowded.metric("num_preemptions_total")
        answers = together([lambda ask=ask, body=body: ask(COMPLETIONS, body) for body in asked])  # type: ignore[misc]
        assert crowd.crowded.metric("num_preemptions_total") > before
        assert [answer.text for answer in answers] == [answer.text for answer in alone]


def test_sch_02_what_never_fits_is_refused_at_the_start(servers: Servers, target: Target) -> None:
    """SCH-02. A pool that cannot hold the longest request is told at once, with both numbers."""
    if target.own is None:
        pytest.skip("needs a server of its own")
    flags = ["--max-model-len", str(40 * BLOCK_SIZE), "--num-gpu-blocks-override", "20"]
    folder = target.own.log.parent
    server = start_server(folder, "--executor", "simulated", "--block-size", str(BLOCK_SIZE), *flags)
    begun = time.monotonic()
    try:
        assert server.wait(30) not in (0, None)
    finally:
        end(server)
    assert time.monotonic() - begun < 30
    last = "\n".join(server.errors().splitlines()[-5:])
    assert all(words in last for words in ("640 tokens", "40 KV blocks", "holds 20")), last


def test_sch_02_a_prompt_over_the_context_stands_in_nobodys_way(target: Target) -> None:
    """SCH-02, big and small, on a server whose pool is what its context needs."""
    big = {"prompt": fresh_ids(2000) if target.max_model_len < 2000 else "x " * 4 * target.max_model_len}
    error = target.refused(COMPLETIONS, big | {"max_tokens": 4} | GREEDY)
    assert str(target.max_model_len) in error["message"]
    begun = time.monotonic()
    target.plain(COMPLETIONS, {"prompt": "a", "max_tokens": 4} | GREEDY)
    assert time.monotonic() - begun < 5
