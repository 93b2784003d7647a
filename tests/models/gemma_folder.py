"""Gemma 3 270M as a Hugging Face folder in float32: made once from the GGUF file, kept in the user's cache.

Nothing of ours takes part: the `gguf` package reads and dequantises, transformers saves.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

from servelite.loader.resolve import cache_folder


def gemma_folder(model_file: Path) -> Path:
    """The folder (1.1 GB); half a minute the first time."""
    folder = cache_folder() / "oracles" / f"{model_file.stem}-float32-{transformers.__version__}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix="part-", dir=folder.parent))
        try:
            _convert(gguf.GGUFReader(model_file)).save_pretrained(part, max_shard_size="400MB")
            os.rename(part, folder)
        except OSError:
            if not folder.is_dir():  # another run was first otherwise, and its folder is as good
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def load_gemma(model_file: Path) -> Any:
    """transformers' model, ready to run."""
    # transformers pulls in torch's compiler, which makes itself a folder at once.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "oracles" / "inductor"))
    return transformers.Gemma3ForCausalLM.from_pretrained(
        gemma_folder(model_file), dtype=torch.float32, local_files_only=True
    ).eval()


def _convert(reader: gguf.GGUFReader) -> Any:
    def field(name: str) -> Any:
        return reader.fields[f"gemma3.{name}"].contents()

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = transformers.Gemma3TextConfig(  # windows, RoPE bases and scales are the class's own defaults
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        head_dim=field("attention.key_length"),
        sliding_window=field("attention.sliding_window"),
        max_position_embeddings=field("context_length"),
    )
    model = transformers.Gemma3ForCausalLM(config).float().eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = tensors[names.get_name(name, try_suffixes=(".weight",))]
            weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)).view(parameter.shape)
            parameter.copy_(weight - 1 if "norm" in name else weight)
    return model
