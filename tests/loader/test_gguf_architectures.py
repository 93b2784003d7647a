"""Each GGUF architecture: a tiny random model of transformers, written with the `gguf` package's names,
gives the same logits when it is read from the GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from servelite.kernels.dispatch import REFERENCE
from servelite.loader.model import load_model
from servelite.tokenizer.model_files import ModelFileError, open_model_files
from tests.loader.test_gguf_tensors import interleave
from tests.paged_forward import paged_logits
from tests.tiny_models import SHAPE

WIDER = SHAPE | {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}
EXPERTS = {"num_experts_per_tok": 2}


def made(folder: Path, name: str, **config: Any) -> Any:
    """A random model of transformers' class `name`, norms and biases random as well."""
    # transformers pulls in torch's compiler, which makes itself a folder at once.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    import transformers

    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(3)
    model = model_class(model_class.config_class(**(WIDER | config))).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def gguf_tensors(model: Any, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values as llama.cpp's converter writes them."""
    config = model.config
    by_name = {"llama": gguf.MODEL_ARCH.LLAMA, "gemma3": gguf.MODEL_ARCH.GEMMA3}
    by_name |= {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
    by_name["qwen3moe"] = gguf.MODEL_ARCH.QWEN3MOE
    names = gguf.get_tensor_name_map(by_name[architecture], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            layer, part = name.split(".")[2], name.rpartition(".")[2]
            parts = {"ffn_down_exps": value}
            if part == "gate_up_proj":
                gate, up = np.split(value, 2, axis=1)
                parts = {"ffn_gate_exps": gate, "ffn_up_exps": up}
            yield from ((f"blk.{layer}.{ours}.weight", each) for ours, each in parts.items())
            continue
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = interleave(value, heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        yield theirs, value


def write(path: Path, model: Any, architecture: str, **more: Any) -> Path:
    config = model.config
    metadata: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters.get("rope_theta", 0.0)),
    } | more
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    for name, value in gguf_tensors(model, architecture):
        writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equal_logits(path: Path, theirs: Any) -> None:
    ids = list(range(40, 80))
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    model = load_model(open_model_files(path), REFERENCE)
    torch.testing.assert_close(paged_logits(model, ids), expected, atol=1e-4, rtol=0)


def test_qwen2_has_biases(tmp_path: Path) -> None:
    theirs = made(tmp_path, "Qwen2", head_dim=8)
    assert_equal_logits(write(tmp_path / "m.gguf", theirs, "qwen2"), theirs)


def test_qwen3_has_norms_of_heads_and_may_have_a_head_of_its_own(tmp_path: Path) -> None:
    theirs = made(tmp_path, "Qwen3", tie_word_embeddings=False)
    assert_equal_logits(write(tmp_path / "m.gguf", theirs, "qwen3"), theirs)


def test_gemma3_has_windows_two_bases_and_norms_around_1(tmp_path: Path) -> None:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
    }
    theirs = made(
        tmp_path,
        "Gemma3",
        num_hidden_layers=7,
        sliding_window=9,
        query_pre_attn_scalar=8,
        rope_parameters=rope,
    )
    more = {
        "attention.sliding_window": 9,
        "rope.freq_base": 50_000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    assert_equal_logits(write(tmp_path / "m.gguf", theirs, "gemma3", **more), theirs)


def test_mixtrals_experts_lie_in_one_tensor(tmp_path: Path) -> None:
    theirs = made(tmp_path, "Mixtral", num_local_experts=4, **EXPERTS)
    counts = {"expert_count": 4, "expert_used_count": 2}
    assert_equal_logits(write(tmp_path / "m.gguf", theirs, "llama", **counts), theirs)


def test_qwen3moes_experts_lie_in_one_tensor(tmp_path: Path) -> None:
    theirs = made(
        tmp_path, "Qwen3Moe", num_experts=4, moe_intermediate_size=32, norm_topk_prob=True, **EXPERTS
    )
    counts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    assert_equal_logits(write(tmp_path / "m.gguf", theirs, "qwen3moe", **counts), theirs)
    counts.pop("expert_feed_forward_length")
    with pytest.raises(ModelFileError, match=r"'qwen3moe\.expert_feed_forward_length'"):
        open_model_files(write(tmp_path / "n.gguf", theirs, "qwen3moe", **counts))
