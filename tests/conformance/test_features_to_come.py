"""Cases of features that are not there: skipped until they are, and no longer."""

from __future__ import annotations

import pytest

from tests.conformance.setups import REAL, Servers
from tests.conformance.target import Target, error_of, given_url


def test_lra_02_an_adapter_that_does_not_fit_is_refused(target: Target) -> None:
    """LRA-02, as far as a server without adapters can be asked: a folder that is none."""
    path = "/v1/load_lora_adapter"
    target.has_route(path)
    reply = target.post(path, {"lora_name": "nope", "lora_path": "/nowhere/at/all"})
    assert 400 <= reply.status_code < 500
    error_of(reply)
    assert "nope" not in [card["id"] for card in target.get("/v1/models").json()["data"]]
    pytest.fail("adapters can be loaded: write LRA-02's broken variants")


def test_spc_02_stops_within_an_accepted_run(servers: Servers) -> None:
    """SPC-02: skipped while no setting speaks of speculation."""
    from servelite.config import flag_table

    if given_url():
        pytest.skip(f"needs servers of its own ({REAL.name})")
    if "specul" not in flag_table():
        pytest.skip("waits for speculative decoding")
    pytest.fail("there is speculative decoding: write SPC-02")
