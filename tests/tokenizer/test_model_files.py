"""Model metadata from GGUF files and Hugging Face folders, in one naming."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servelite.tokenizer.model_files import ModelFileError, ModelFiles, open_model_files
from tests.tokenizer.small_gguf import HIDDEN, TOKENS, write_gguf

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def folder(path: Path, **files: Any) -> Path:
    """A model folder; keyword `a__b` writes a.b, text as it is and anything else as JSON."""
    files = {"config__json": CONFIG} | files
    for name, content in files.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (path / name.replace("__", ".")).write_text(text)
    return path


def test_the_demo_models_configuration(demo_files: ModelFiles) -> None:
    """The figures of the model's own config.json."""
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 8192,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "bos_token_id": 1,
    }
    assert {key: demo_files.config[key] for key in expected} == expected
    assert demo_files.format == "gguf" and demo_files.architecture == "LlamaForCausalLM"
    assert demo_files.eos_token_ids == (2,) and demo_files.max_model_len == 8192
    assert demo_files.chat_template is not None and "<|im_start|>" in demo_files.chat_template
    assert demo_files.gguf is not None and len(demo_files.gguf.tensors) == 272


def test_a_gguf_file_with_its_own_output_matrix_is_not_tied(tmp_path: Path) -> None:
    files = open_model_files(write_gguf(tmp_path / "m.gguf", tied=False))
    assert files.config["tie_word_embeddings"] is False
    assert files.config["vocab_size"] == len(TOKENS) and files.config["head_dim"] == HIDDEN // 4


def test_every_end_token_of_a_gguf_file_counts(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tokenizer__ggml__eot_token_id=7, tokenizer__ggml__eom_token_id=5)
    assert open_model_files(path).eos_token_ids == (1, 5, 7)


def test_another_gguf_architecture_opens_under_its_own_name(tmp_path: Path) -> None:
    files = open_model_files(write_gguf(tmp_path / "m.gguf", architecture="starcoder2"))
    assert files.architecture == "starcoder2" and files.config["hidden_size"] == HIDDEN


def test_experts_make_it_another_class(tmp_path: Path) -> None:
    files = open_model_files(write_gguf(tmp_path / "m.gguf", llama__expert_count=8))
    assert files.architecture == "MixtralForCausalLM"


def test_rope_scaling_is_told_not_dropped(tmp_path: Path) -> None:
    scaled = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    config = open_model_files(write_gguf(tmp_path / "m.gguf", **scaled)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_yarns_numbers_have_hugging_faces_names(tmp_path: Path) -> None:
    scaled = {
        "qwen2__rope__scaling__type": "yarn",
        "qwen2__rope__scaling__factor": 4.0,
        "qwen2__rope__scaling__original_context_length": 32,
        "qwen2__rope__scaling__finetuned": True,
    }
    files = open_model_files(write_gguf(tmp_path / "m.gguf", architecture="qwen2", **scaled))
    assert files.architecture == "Qwen2ForCausalLM"
    assert files.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def rope_divisors(factor: float, low: float = 1.0, high: float = 4.0) -> list[float]:
    """What llama.cpp's converter writes for Llama 3.1's scaling of 32 dimensions at base 500,000."""
    divisors = []
    for i in range(16):
        wavelength = 2 * math.pi * 500_000 ** (2 * i / 32)
        smooth = (8192 / wavelength - low) / (high - low)
        if wavelength < 8192 / high:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


LLAMA31 = {"llama__rope__dimension_count": 32, "llama__rope__freq_base": 500_000.0}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_31s_divisors_are_recognised(tmp_path: Path, factor: float) -> None:
    tensors = {"rope_freqs.weight": np.array(rope_divisors(factor), np.float32)}
    config = open_model_files(write_gguf(tmp_path / "m.gguf", tensors=tensors, **LLAMA31)).config
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("divisors", [rope_divisors(8.0, high=3.0), rope_divisors(8.0)[:15]])
def test_other_divisors_are_refused_by_name_later(tmp_path: Path, divisors: list[float]) -> None:
    tensors = {"rope_freqs.weight": np.array(divisors, np.float32)}
    config = open_model_files(write_gguf(tmp_path / "m.gguf", tensors=tensors, **LLAMA31)).config
    assert config["rope_scaling"]["rope_type"] == "gguf_frequency_factors"


def test_what_gemma_3_always_has_is_filled_in(tmp_path: Path) -> None:
    more = {"gemma3__block_count": 8, "gemma3__attention__sliding_window": 16}
    config = open_model_files(write_gguf(tmp_path / "m.gguf", architecture="gemma3", **more)).config
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 16,
        "rope_theta": 50_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": HIDDEN // 4,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", *["sliding_attention"] * 2],
    }
    assert {key: config[key] for key in expected} == expected


def test_gemma_3_of_27b_scales_by_its_width(tmp_path: Path) -> None:
    more = {"gemma3__block_count": 62, "gemma3__attention__key_length": 128}
    config = open_model_files(write_gguf(tmp_path / "m.gguf", architecture="gemma3", **more)).config
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (128, HIDDEN // 4)


def test_a_pattern_of_windows_in_the_file_counts(tmp_path: Path) -> None:
    pattern = {"gemma3__attention__sliding_window_pattern": [True, False]}
    config = open_model_files(write_gguf(tmp_path / "m.gguf", architecture="gemma3", **pattern)).config
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    pattern = {"gemma3__attention__sliding_window_pattern": [True]}
    with pytest.raises(ModelFileError, match="sliding_window_pattern"):
        open_model_files(write_gguf(tmp_path / "n.gguf", architecture="gemma3", **pattern))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"split__count": 3}, "one of 3 parts of a model; join them first"),
        ({"llama__embedding_length": None}, "metadata key 'llama.embedding_length' is absent"),
        ({"llama__attention__head_count": 0}, "'llama.attention.head_count' is 0, no positive number"),
        ({"llama__context_length": "long"}, "'llama.context_length' is 'long', no positive number"),
        ({"llama__rope__freq_base": "x"}, "'llama.rope.freq_base' is 'x', no positive number"),
        ({"tokenizer__ggml__eos_token_id": "x"}, "'tokenizer.ggml.eos_token_id' is 'x', no token ID"),
        ({"tokenizer__ggml__eos_token_id": 9999}, "'tokenizer.ggml.eos_token_id' is 9999, no token ID"),
        ({"tokenizer__ggml__bos_token_id": 9999}, "'tokenizer.ggml.bos_token_id' is 9999, no token ID"),
        ({"tokenizer__ggml__bos_token_id": [4]}, "'tokenizer.ggml.bos_token_id' is [4], no token ID"),
        ({"llama__context_length": [4]}, "'llama.context_length' is [4], no positive number"),
        ({"llama__block_count": [2]}, "'llama.block_count' is [2], no positive number"),
        ({"llama__block_count": 1 << 30}, "'llama.block_count' is 1073741824, above the limit of 4096"),
        ({"llama__rope__freq_base": math.inf}, "'llama.rope.freq_base' is inf, no positive number"),
        ({"llama__rope__dimension_count": "x"}, "'llama.rope.dimension_count' is 'x', no positive number"),
        (
            {"llama__attention__layer_norm_rms_epsilon": math.inf},
            "'llama.attention.layer_norm_rms_epsilon' is inf, no positive number",
        ),
    ],
)
def test_a_gguf_file_with_a_bad_key_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelFileError) as caught:
        open_model_files(path)
    assert says in str(caught.value) and str(path) in str(caught.value)


def test_a_folders_missing_values_are_filled_in(tmp_path: Path) -> None:
    files = open_model_files(folder(tmp_path))
    assert files.format == "hf" and files.gguf is None and files.architecture == "LlamaForCausalLM"
    assert files.config["num_key_value_heads"] == 4 and files.config["head_dim"] == 16
    assert files.config["tie_word_embeddings"] is False
    assert "rope_theta" not in files.config  # each family has a default of its own
    assert files.max_model_len == 512 and files.chat_template is None and files.generation_config == {}


def test_rope_parameters_of_transformers_5_come_out_under_both_names(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    config = open_model_files(folder(tmp_path, config__json=CONFIG | {"rope_parameters": rope})).config
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == rope


def test_end_tokens_are_the_union_of_all_files(tmp_path: Path) -> None:
    files = open_model_files(
        folder(
            tmp_path,
            generation_config__json={"eos_token_id": [7, 2]},
            tokenizer_config__json={"eos_token": {"content": "<end>"}},
            tokenizer__json={"added_tokens": [{"id": 11, "content": "<end>"}], "model": {"vocab": {"a": 0}}},
        )
    )
    assert files.eos_token_ids == (2, 7, 11)


def test_an_end_token_known_from_the_tokenizers_configuration(tmp_path: Path) -> None:
    config = {"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}}}
    assert open_model_files(folder(tmp_path, tokenizer_config__json=config)).eos_token_ids == (2, 9)


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", "x", ""])
def test_an_added_tokens_number_that_is_none_counts_for_nothing(tmp_path: Path, number: str) -> None:
    config = {"eos_token": "<end>", "added_tokens_decoder": {number: {"content": "<end>"}}}
    assert open_model_files(folder(tmp_path, tokenizer_config__json=config)).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template__jinja": "J", "tokenizer_config__json": {"chat_template": "T"}}, "J"),
        ({"chat_template__json": {"chat_template": "C"}}, "C"),
        ({"tokenizer_config__json": {"chat_template": "T"}}, "T"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [
                        {"name": "rag", "template": "R"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
        ({}, None),
    ],
)
def test_where_a_chat_template_comes_from(
    tmp_path: Path, files: dict[str, Any], template: str | None
) -> None:
    assert open_model_files(folder(tmp_path, **files)).chat_template == template


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config__json": None}, "no config.json in this folder"),
        ({"config__json": "{"}, "config.json: not valid JSON"),
        ({"config__json": []}, "config.json: not a JSON object"),
        ({"config__json": CONFIG | {"architectures": []}}, "'architectures' is absent or empty"),
        ({"config__json": CONFIG | {"max_position_embeddings": None}}, "none of max_position_embeddings"),
        ({"config__json": CONFIG | {"eos_token_id": "x"}}, "'eos_token_id' is 'x'"),
        ({"config__json": CONFIG | {"eos_token_id": 10**30}}, "'eos_token_id' is 1000000000000000"),
        (
            {
                "tokenizer_config__json": {"eos_token": "e"},
                "tokenizer__json": {"added_tokens": [{"id": 1 << 40, "content": "e"}]},
            },
            "tokenizer.json: damaged",
        ),
        ({"generation_config__json": {"eos_token_id": [1, "x"]}}, "generation_config.json: 'eos_token_id'"),
        ({"tokenizer_config__json": {"eos_token": "e"}, "tokenizer__json": "{"}, "tokenizer.json: not valid"),
        ({"config__json": CONFIG | {"max_position_embeddings": True}}, "none of max_position_embeddings"),
        ({"config__json": CONFIG | {"max_position_embeddings": 10**30}}, "config field max_position_embed"),
        (
            {"config__json": CONFIG | {"num_hidden_layers": 4097}},
            "num_hidden_layers is 4097, above the limit",
        ),
        ({"config__json": CONFIG | {"num_hidden_layers": 600, "num_experts": 600}}, "experts in all"),
        (
            {"tokenizer_config__json": {"eos_token": "e", "added_tokens_decoder": ["x"]}},
            "tokenizer_config.json: 'added_tokens_decoder' is ['x'], not an object",
        ),
    ],
)
def test_a_bad_folder_is_refused_with_the_file_named(
    tmp_path: Path, files: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelFileError) as caught:
        open_model_files(folder(tmp_path, **files))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file or folder"):
        open_model_files(tmp_path / "nothing")
