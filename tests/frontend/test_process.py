"""The front end's process: what it loads, and what it says at its start."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from servelite.frontend.process import FrontEnd
from servelite.ipc.lifeline import Lifeline, lifeline_pair
from servelite.ipc.messages import Boot, ChildReady
from tests.frontend.fake_engine import service_and_engine


def test_neither_torch_nor_transformers_is_loaded(demo_model: Path) -> None:
    """With the model's files opened and the tokenizer made, as the process does at its start."""
    code = (
        "import sys\n"
        "import servelite.frontend.__main__, servelite.frontend.process as p\n"
        f"tokenizer = p.read_metadata(p.Settings(model={str(demo_model)!r})).tokenizer\n"
        "assert tokenizer.clone().encode('x', add_special_tokens=True)\n"
        "print([m for m in ('torch', 'transformers', 'pandas', 'scipy') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


@pytest.mark.parametrize(("vocab_size", "told"), [(49152, False), (49280, False), (1000, True)])
async def test_a_tokenizer_beyond_the_model_is_told(
    vocab_size: int, told: bool, demo_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with service_and_engine(demo_model, tmp_path, greet=False) as (service, engine):
        launcher, fd = lifeline_pair()
        lifeline = Lifeline.from_fd(fd)
        front_end = FrontEnd(lifeline, Boot({}, 0, 0, "", -1), service)
        front_end._server._started.set()
        announcing = asyncio.create_task(front_end._announce())
        await engine.greet(vocab_size=vocab_size)
        await asyncio.wait_for(announcing, 5)
        assert isinstance(launcher.recv(), ChildReady) and service.lifecycle.ready
        assert ("has 49152 tokens, the model 1000" in caplog.text) is told
        launcher.close()
        lifeline.close()
