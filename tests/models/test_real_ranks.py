"""The real models on several ranks: the demo model's 9 heads on three, Gemma's one KV head on two of them.

Logits with ranks as threads; tokens, greedy and seeded, through servers with rank processes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from servelite.kernels.collective import ONE_RANK, Collective
from servelite.kernels.dispatch import choose_kernels
from servelite.loader.model import load_model
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import load_tokenizer
from tests.faults.streams import Told, stream
from tests.http.server import running_server
from tests.paged_forward import paged_logits
from tests.rank_threads import run_ranks
from tests.ties import Draw, Pair, compare_tokens, model_scorer

TEXT = "Once upon a time there was a dragon who was afraid of fire. " * 4
FLAGS = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(256 << 20))
COUNT, TOKENS = 8, 32

pytestmark = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.timeout(1200)]


@pytest.fixture(params=[("demo", 3), ("gemma", 2)], ids=["demo on 3", "gemma on 2"])
def model(request: pytest.FixtureRequest) -> tuple[Path, int]:
    name, ranks = request.param
    return request.getfixturevalue(f"{name}_model"), ranks


def test_logits_are_those_of_one_rank(model: tuple[Path, int]) -> None:
    path, ranks = model
    files = open_model_files(path)
    ids = load_tokenizer(files).encode(TEXT, add_special_tokens=True)

    def run(group: Collective) -> torch.Tensor:
        return paged_logits(
            load_model(files, choose_kernels("cpu"), group=group), ids, (len(ids) - 8, *[1] * 8)
        )

    (expected,) = run_ranks(1, lambda _: run(ONE_RANK))
    first, *others = run_ranks(ranks, run)
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=0)
    assert all(torch.equal(first, other) for other in others)


def body(number: int) -> dict[str, Any]:
    """Half greedy, half seeded."""
    return {
        "model": "m",
        "prompt": f"{number}. " + TEXT[: 30 * number],
        "temperature": 0.8 * (number % 2),
        "seed": number,
        "max_tokens": TOKENS,
    }


def test_tokens_are_those_of_one_rank(model: tuple[Path, int], tmp_path: Path) -> None:
    path, ranks = model
    bodies = [body(number) for number in range(COUNT)]
    got: list[list[Told]] = []
    for tp in (1, ranks):
        flags = (*FLAGS, "--tp", str(tp), "--served-model-name", "m")
        with running_server(tmp_path, *flags, model=str(path)) as server:

            async def ask(port: int = server.port) -> list[Told]:
                return await asyncio.gather(*(stream(port, each) for each in bodies))

            prompts = [
                server.post("/tokenize", {"model": "m", "prompt": b["prompt"]})[1]["tokens"] for b in bodies
            ]
            got.append(asyncio.run(ask()))
    pairs = [
        Pair(f"request {i}", prompts[i], one.token_ids, several.token_ids, Draw(bodies[i]["temperature"], i))
        for i, (one, several) in enumerate(zip(*got, strict=True))
    ]
    print(compare_tokens(pairs, model_scorer(load_model(open_model_files(path), choose_kernels("cpu")))))
    assert sum(len(told.token_ids) for told in got[0]) > COUNT * TOKENS / 2
