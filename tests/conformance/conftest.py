"""The servers of the conformance cases, shared by a whole run.

The fixtures that start one are wider than a test: what a test itself starts has to be gone when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.setups import GEMMA, LOADED, NARROW, ODD, PLAIN, REAL, Servers
from tests.conformance.target import Target, given_url

REAL_MODEL = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.timeout(600)]
"""Of a case that runs the demo model: some hundreds of tokens, one after the other."""


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Servers]:
    if not given_url():
        request.getfixturevalue("demo_model")
    made = Servers(tmp_path_factory.mktemp("conformance"), {})
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def target(servers: Servers) -> Target:
    """A server with a chat template, 512 tokens long; or the given one."""
    return servers.get(PLAIN)


@pytest.fixture(scope="module")
def scripted(servers: Servers) -> Target:
    """The same, and certainly one that answers by the script."""
    return servers.own(PLAIN)


@pytest.fixture(scope="module")
def odd(servers: Servers) -> Target:
    """A server with a key, a template that refuses system messages, and a mild way with unknown fields."""
    return servers.own(ODD)


@pytest.fixture(scope="module")
def narrow(servers: Servers) -> Target:
    """A server with two rows, four places to wait, and a model without a chat template."""
    return servers.own(NARROW)


@pytest.fixture(scope="module")
def real(servers: Servers) -> Target:
    """The demo model in float32, 512 tokens long, with small prefill chunks; or the given one."""
    return servers.get(REAL)


@pytest.fixture(scope="module", params=["simulated", pytest.param("real", marks=REAL_MODEL)])
def each(request: pytest.FixtureRequest, servers: Servers) -> Target:
    """Either of the two."""
    return servers.get(PLAIN if request.param == "simulated" else REAL)


@pytest.fixture(scope="module")
def gemma(servers: Servers, gemma_model: Path) -> Target:
    """A model whose tokenizer adds BOS and has byte fallback, under a template that writes BOS too."""
    servers.models[GEMMA] = gemma_model
    return servers.own(LOADED)
