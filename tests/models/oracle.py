"""What transformers answers with a real model, greedily in float32; computed once, then kept.

The tokens take half a minute and more, so they are kept in the user's cache under a hash of all that decides
them. Nothing of ours takes part: the `gguf` package reads and dequantises, transformers runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from servelite.loader.resolve import cache_folder

_VERSION = 1  # of how the tokens are computed here


def greedy_answers(
    model_file: Path,
    prompts: Sequence[Sequence[int]],
    count: int,
    load: Callable[[Path], Any] | None = None,
) -> list[list[int]]:
    """`count` greedy tokens after each prompt (token IDs); fewer where the end token comes first.

    `load`: makes transformers' model of the file; not given: a Llama.
    """
    about = [_VERSION, version("transformers"), torch.__version__, count, [list(p) for p in prompts]]
    with model_file.open("rb") as file:
        about.append(hashlib.file_digest(file, "sha256").hexdigest())
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    kept = cache_folder() / "oracles" / f"{key}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    model = (load or load_llama)(model_file)
    answers = _compute(model, prompts, count)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
        json.dump(answers, file)
    os.replace(file.name, kept)
    return answers


def _compute(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=count,
                do_sample=False,
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def load_llama(model_file: Path) -> Any:
    """transformers' Llama with the weights of a GGUF file, in float32."""
    reader = gguf.GGUFReader(model_file)
    # transformers pulls in torch's compiler, which makes itself a folder at once.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "oracles" / "inductor"))
    from transformers import LlamaConfig, LlamaForCausalLM

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    model = LlamaForCausalLM(config).float().eval()
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = tensors[names.get_name(name, try_suffixes=(".weight",))]
            weight = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(parameter.shape)
            if "q_proj" in name or "k_proj" in name:
                weight = _part_halves(weight, heads if "q_proj" in name else kv_heads)
            parameter.copy_(torch.from_numpy(np.array(weight)))
    return model


def _part_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF has row 2i of a head's first half beside 2i + 1 of its second; even rows first again."""
    per_head = np.split(weight, heads)
    return np.concatenate([np.concatenate((head[0::2], head[1::2])) for head in per_head])
