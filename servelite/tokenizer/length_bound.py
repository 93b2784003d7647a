"""Whether every byte of a text is in one of its tokens, so that a text's size tells how few they can be."""

from __future__ import annotations

import json
from typing import Any, Final

from tokenizers import Tokenizer as Backend

# Composition (NFC) does not count as a loss: what it saves is far below what the longest token, taken
# for all of them, allows.
_NORMALIZERS: Final = ("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Lowercase", "ByteLevel")
_PRE_TOKENIZERS: Final = ("ByteLevel", "Digits", "Metaspace")


def keeps_every_byte(backend: Backend) -> bool:
    """False where a step may drop text, or one unknown token stand for much of it."""
    state = json.loads(backend.to_str())
    model = state["model"]
    normalizers = _steps(state["normalizer"], "normalizers")
    pre_tokenizers = _steps(state["pre_tokenizer"], "pretokenizers")
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *pre_tokenizers))
    one_each = model.get("unk_token") is not None and not model.get("fuse_unk")
    return (
        model.get("type") == "BPE"
        and (byte_level or bool(model.get("byte_fallback")) or one_each)
        and all(_normalizer_keeps(step) for step in normalizers)
        and all(
            step["type"] in _PRE_TOKENIZERS or (step["type"] == "Split" and step["behavior"] != "Removed")
            for step in pre_tokenizers
        )
    )


def _steps(state: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a sequence, or the one step, or none."""
    if state is None:
        return []
    return [inner for step in state[name] for inner in _steps(step, name)] if name in state else [state]


def _normalizer_keeps(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern: str | None = step["pattern"].get("String")
        return pattern is not None and len(step["content"]) >= len(pattern)
    return step["type"] in _NORMALIZERS
