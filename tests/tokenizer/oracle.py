"""transformers' tokenizer for the demo model, made once and kept in the user's cache.

Its conversion of this GGUF misses what `tokenizer.ggml.pre` = smollm means, the split of each digit, so
the pre-tokenizer is set as the model's own tokenizer.json has it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoTokenizer

from servelite.loader.resolve import cache_folder


def load_oracle(model: Path) -> Any:
    """transformers' fast tokenizer for `model`, a GGUF file; seconds the first time, then quick."""
    folder = cache_folder() / "oracles" / f"{model.stem}-tokenizer-{transformers.__version__}"
    if not folder.is_dir():
        _make(model, folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _make(model: Path, folder: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name, local_files_only=True)
    oracle.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix="part-", dir=folder.parent))
    try:
        oracle.save_pretrained(part)
        os.rename(part, folder)
    except OSError:
        if not folder.is_dir():  # another run was first otherwise, and its copy is as good
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
