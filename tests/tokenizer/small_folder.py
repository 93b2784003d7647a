"""Small Hugging Face folders with a tokenizer and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 4,
    "hidden_size": 64,
    "max_position_embeddings": 64,
}


def save(folder: Path, backend: Backend, *, vocab_size: int | None = None, **tokenizer_config: Any) -> Path:
    """A folder with `backend` as its tokenizer.json; `vocab_size` is the model's."""
    folder.mkdir(exist_ok=True)
    size = backend.get_vocab_size() if vocab_size is None else vocab_size
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": size}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    backend.save(str(folder / "tokenizer.json"))
    return folder


def sentencepiece() -> Backend:
    """A tokenizer in the manner of Llama 2: byte fallback, U+2581 for a space, one put in front."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁hi"]
    vocab = {word: index for index, word in enumerate(words)}
    merges = [("h", "i"), ("▁", "hi")]
    vocab["hi"] = len(vocab)
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend
