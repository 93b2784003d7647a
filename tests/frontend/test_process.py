"""The front end's process: what it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


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
