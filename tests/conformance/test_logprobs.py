"""Log probabilities: echo's alignment, numbers that JSON has, and prompts that the cache holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.answers import Answer
from tests.conformance.conftest import REAL_MODEL
from tests.conformance.setups import BLOCK_SIZE, TINY, TINY_UNCACHED, Servers
from tests.conformance.sse import strict_json
from tests.conformance.target import CHAT, COMPLETIONS, GREEDY, Target
from tests.conformance.test_usage import fresh_ids

pytestmark = REAL_MODEL

TEXT = "\n1. Carol  has 20"
LEAST = -9999.0


def numbers(answer: Answer) -> list[float]:
    """The logprobs of its tokens, the prompt's first (null) apart."""
    (choice,) = answer.choices
    first, *others = choice.logprobs["token_logprobs"]
    assert first is None and choice.logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) and LEAST <= value <= 1e-6 for value in others)
    return others


def test_lgp_02_echo_with_logprobs(real: Target) -> None:
    """LGP-02. Every token has its number and its place in the text."""
    body = {"prompt": TEXT, "max_tokens": 5, "echo": True, "logprobs": 1} | GREEDY
    answer, stream = real.plain(COMPLETIONS, body), real.stream(COMPLETIONS, body)
    table = answer.choices[0].logprobs
    count = answer.counts["total_tokens"]
    assert {len(table[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {
        count
    }
    assert answer.text.startswith(TEXT) and "".join(table["tokens"]) == answer.text
    offsets = [*table["text_offset"], len(answer.text)]
    assert offsets[0] == 0 and offsets == sorted(offsets)
    for token, begin, end in zip(table["tokens"], offsets, offsets[1:], strict=False):
        assert answer.text[begin:end] == token
    assert stream.text == answer.text and stream.choices[0].logprobs["tokens"] == table["tokens"]
    assert numbers(stream) == pytest.approx(numbers(answer), abs=1e-4)
    by_ids = real.plain(COMPLETIONS, body | {"prompt": real.tokens_of(TEXT)})
    assert by_ids.text == answer.text and numbers(by_ids) == pytest.approx(numbers(answer), abs=1e-4)


def test_lgp_02_the_numbers_are_transformers(real: Target, demo_model: Path) -> None:
    """LGP-02, last line: the sum of the prompt's, in float32."""
    if real.own is None:
        pytest.skip("the reference is of the demo model")
    import torch

    from tests.models.oracle import load_llama

    text = TEXT + " apples and gives 7 of them to Ann. How many are left?"
    answer = real.plain(COMPLETIONS, {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 0} | GREEDY)
    ids = torch.tensor([real.tokens_of(text)])
    with torch.inference_mode():
        scores = load_llama(demo_model)(ids).logits.log_softmax(-1)
    expected = scores[0, :-1].gather(-1, ids[0, 1:, None]).sum().item()
    assert sum(numbers(answer)[:-1]) == pytest.approx(expected, abs=1e-2)


def _strict(raw: str | bytes) -> list[float]:
    """Every number of an answer's logprobs, strictly JSON."""
    found: list[float] = []

    def walk(value: Any, within: bool) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, within or "logprob" in name)
        elif isinstance(value, list):
            for inner in value:
                walk(inner, within)
        elif within and isinstance(value, float):
            found.append(value)

    walk({name: value for name, value in strict_json(raw).items() if name == "choices"}, False)
    return found


def _check_numbers(target: Target, path: str, body: dict) -> None:
    reply = target.post(path, body)
    assert reply.status_code == 200, reply.text
    found = _strict(reply.content)
    events = target.events(path, body)  # which reads strictly
    streamed = [value for chunk in events.chunks for value in _strict(json.dumps(chunk))]
    assert found and streamed
    assert all(math.isfinite(value) and LEAST <= value <= 1e-6 for value in found + streamed)


def test_lgp_03_impossible_tokens_do_not_break_json(real: Target) -> None:
    """LGP-03. Of one possible token, and with the likeliest banned."""
    one = {
        "prompt": "correct horse",
        "max_tokens": 4,
        "temperature": 1,
        "top_k": 1,
        "logprobs": 5,
        "echo": True,
    }
    _check_numbers(real, COMPLETIONS, one)
    body = {"prompt": "a", "max_tokens": 4, "logprobs": 5} | GREEDY
    table = real.plain(COMPLETIONS, body).choices[0].logprobs["top_logprobs"][0]
    ids = [real.tokens_of(token) for token in table]
    banned = {str(each[0]): -100 for each in ids if len(each) == 1}
    assert len(banned) >= 3
    _check_numbers(real, COMPLETIONS, body | {"logit_bias": banned})


def test_lgp_03_under_a_grammar(real: Target) -> None:
    """LGP-03, gram: almost every token is impossible."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 20,
        "logprobs": True,
        "top_logprobs": 20,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "b", "schema": {"type": "boolean"}},
        },
    } | GREEDY
    real.needs("response_format")
    _check_numbers(real, CHAT, body)


SCORED = {"max_tokens": 1, "echo": True, "logprobs": 3} | GREEDY


@pytest.fixture(scope="module")
def cached_prompts() -> list[list[int]]:
    """A prompt, and another that begins with three of its blocks."""
    first = fresh_ids(5 * BLOCK_SIZE + 2, TINY.vocab)
    return [first, first[: 3 * BLOCK_SIZE] + fresh_ids(2 * BLOCK_SIZE + 2, TINY.vocab)]


@pytest.fixture(scope="module")
def uncached_numbers(servers: Servers, cached_prompts: list[list[int]]) -> list[list[float]]:
    """What a server without a prefix cache says of them."""
    uncached = servers.own(TINY_UNCACHED)
    return [numbers(uncached.plain(COMPLETIONS, SCORED | {"prompt": ids})) for ids in cached_prompts]


@pytest.fixture(scope="module")
def cached(servers: Servers, uncached_numbers: list[list[float]]) -> Target:
    """A server with a prefix cache; the other is ended before it."""
    return servers.own(TINY)


def test_pfx_03_prompt_logprobs_on_a_cached_prompt(
    cached: Target, cached_prompts: list[list[int]], uncached_numbers: list[list[float]]
) -> None:
    """PFX-03. The cache holds no logits: what was cached has its numbers all the same."""
    first, second = cached_prompts
    cached.plain(COMPLETIONS, {"prompt": first, "max_tokens": 1} | GREEDY)
    for _ in range(2):
        assert numbers(cached.plain(COMPLETIONS, SCORED | {"prompt": first})) == pytest.approx(
            uncached_numbers[0], abs=1e-3
        )
    assert numbers(cached.plain(COMPLETIONS, SCORED | {"prompt": second})) == pytest.approx(
        uncached_numbers[1], abs=1e-3
    )
    body = {"prompt": first, "max_tokens": 1, "prompt_logprobs": 3} | GREEDY
    reply = cached.post(COMPLETIONS, body).json()
    table = reply["choices"][0]["prompt_logprobs"]
    assert len(table) == len(first) and table[0] is None
    chosen = [entry[str(token)]["logprob"] for entry, token in zip(table[1:], first[1:], strict=True)]
    assert chosen == pytest.approx(uncached_numbers[0][: len(first) - 1], abs=1e-3)
    cached.check_alive()
