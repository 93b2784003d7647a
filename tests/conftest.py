"""What every test runs under: thread settings, a clean environment, skips and leftovers policed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported by anything: two threads that do not spin, as the servers' children have.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import hypothesis
import pytest

from tests import inherited_signals, leftovers, skips

inherited_signals.reset()  # before any child is started

# Settings are read from SERVELITE_*: a developer's own must not reach the tests.
_KEPT = {"SERVELITE_BASE_URL", "SERVELITE_CACHE", "SERVELITE_TEST_ROUNDS", skips.VARIABLE}
for name in [name for name in os.environ if name.startswith("SERVELITE_") and name not in _KEPT]:
    del os.environ[name]

hypothesis.settings.register_profile("local", deadline=None, max_examples=60)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

TEST_ALL = os.environ.get(skips.VARIABLE, "") not in ("", "0")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    run = leftovers.Run()
    run.enter(config)
    config.pluginmanager.register(leftovers.LeftoverCheck(run), "servelite-leftovers")
    if TEST_ALL:
        allowed = skips.read_allowed(Path(__file__).with_name("allowed_skips.txt"))
        config.pluginmanager.register(skips.SkipPolice(allowed), "servelite-skips")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For a module whose products are too small for two."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file, from the user's cache or fetched into it."""
    from servelite.loader.demo import demo_model_path
    from servelite.loader.resolve import ModelNotFound

    try:
        return demo_model_path()
    except ModelNotFound as error:
        pytest.skip(f"the demo model cannot be had: {error}")


@pytest.fixture(scope="session")
def gemma_model() -> Path:
    """Gemma 3 270M's GGUF file, from the user's cache or fetched into it."""
    from tests.models.gemma import Unavailable, gemma_model_path

    try:
        return gemma_model_path()
    except (Unavailable, OSError) as error:
        pytest.skip(f"the Gemma model cannot be had: {error}")


@pytest.fixture(scope="session")
def minilm_model() -> Path:
    """A sentence encoder's folder, from the user's cache or fetched into it."""
    from tests.models.minilm import Unavailable, minilm_path

    try:
        return minilm_path()
    except (Unavailable, OSError) as error:
        pytest.skip(f"the encoder cannot be had: {error}")
