"""Small GGUF files, written with the `gguf` package: an implementation that is not ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np

from servelite.tokenizer.token_bytes import BYTE_ALPHABET

CONTROL, USER_DEFINED, NORMAL = 3, 4, 1
BYTES = sorted(BYTE_ALPHABET)
WORDS = ["he", "ll", "hell", "hello", "Ġh", "Ġhe"]
MERGES = ["Ġ h", "Ġh e", "h e", "l l", "he ll", "hell o"]
TOKENS = ["<bos>", "<eos>", "<tool>", *BYTES, *WORDS]
TYPES = [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (len(BYTES) + len(WORDS))]
HIDDEN = 32


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tied: bool = True,
    tensors: Mapping[str, np.ndarray] = MappingProxyType({}),
    **changes: Any,
) -> Path:
    """A model without layers, and `tensors` besides.

    `changes`: metadata by key, with "__" for "."; None leaves a key out.
    """
    prefix = architecture
    metadata: dict[str, Any] = {
        f"{prefix}.embedding_length": HIDDEN,
        f"{prefix}.block_count": 2,
        f"{prefix}.feed_forward_length": 64,
        f"{prefix}.attention.head_count": 4,
        f"{prefix}.attention.head_count_kv": 2,
        f"{prefix}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{prefix}.rope.freq_base": 50000.0,
        f"{prefix}.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    table = np.arange(len(TOKENS) * HIDDEN, dtype=np.float32).reshape(len(TOKENS), HIDDEN)
    writer.add_tensor("token_embd.weight", table)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    if not tied:
        writer.add_tensor("output.weight", table)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
