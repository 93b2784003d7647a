"""A request that is much work for the front end does not make another's stream wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stalls import FLAGS, measure
from tests.http.server import running_server

LIMIT_S = (
    0.020  # beyond the longest gap beside nothing; five times that is allowed, machines being as they are
)
PROMPTS = (
    "completions",
    "token IDs",
    "chat",
    "responses",
    "messages",
    "count",
    "grammar",
    "tools",
    "20 MB of text",
)


@pytest.mark.slow
def test_the_longest_gap_of_another_stream(tmp_path: Path, demo_model: Path) -> None:
    with running_server(tmp_path, *FLAGS, "--served-model-name", "x") as server:
        for case in PROMPTS:
            quiet, beside, status = measure(server.port, case, rounds=3)
            assert status == (400 if case.startswith("20 MB") else 200)
            assert beside - quiet < 5 * LIMIT_S, (case, quiet, beside)
