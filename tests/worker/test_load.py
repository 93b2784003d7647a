"""Which runner the settings get, and what is imported for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from servelite.config import Settings
from servelite.tokenizer.model_files import ModelFileError
from servelite.worker.load import load_runner


def test_the_simulated_runner_comes_without_torch(demo_model: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from servelite.config import Settings\n"
        "from servelite.worker.load import load_runner\n"
        f"runner = load_runner(Settings(executor='simulated'), Path({str(demo_model)!r}))\n"
        "assert runner.facts.vocab_size == 49152\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_path_that_is_no_model_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"^[^\n]+$"):
        load_runner(Settings(), tmp_path)
    (tmp_path / "note.gguf").write_text("this is a text, " * 10)
    with pytest.raises(ModelFileError, match=r"note\.gguf: not a GGUF file"):
        load_runner(Settings(), tmp_path / "note.gguf")
