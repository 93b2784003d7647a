"""Prefix cache: what a salt parts, no block joins."""

from __future__ import annotations

import pytest

from tests.conformance.setups import BLOCK_SIZE, ODD, PLAIN, TINY, TINY_UNCACHED, Servers
from tests.conformance.target import COMPLETIONS, GREEDY, Target
from tests.conformance.test_usage import fresh_ids

WHOLE = 4 * BLOCK_SIZE
Case = tuple[list[int], str, Target]
"""A prompt, what a server without a prefix cache continues it with, and a server with one."""


@pytest.fixture(scope="module", params=["simulated", pytest.param("real", marks=pytest.mark.slow)])
def case(request: pytest.FixtureRequest, servers: Servers) -> Case:
    uncached, cached = (ODD, PLAIN) if request.param == "simulated" else (TINY_UNCACHED, TINY)
    prompt = fresh_ids(WHOLE + 3, cached.vocab)
    reference = servers.own(uncached).plain(COMPLETIONS, {"prompt": prompt, "max_tokens": 16} | GREEDY)
    assert reference.cached == 0
    return prompt, reference.text, servers.own(cached)


def test_pfx_01_salts_and_no_salt_share_nothing(case: Case) -> None:
    """PFX-01, base_salt, base and salt2: each misses at first, and finds its own the second time."""
    prompt, reference, target = case
    body = {"prompt": prompt, "max_tokens": 16} | GREEDY
    salted = [body | {"cache_salt": "COLLIDE"}, body, body | {"cache_salt": "other"}]
    for cached in (0, WHOLE):
        for asked in salted:
            answer = target.plain(COMPLETIONS, asked)
            assert answer.cached == cached and answer.text == reference


def test_pfx_01_an_adapter_shares_nothing_with_the_base(target: Target) -> None:
    """PFX-01, lora and reload: with adapters there will be a case here to run."""
    target.has_route("/v1/load_lora_adapter")
    pytest.fail("adapters can be loaded: write PFX-01's adapter lines")
