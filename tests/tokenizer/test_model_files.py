"""Model metadata from GGUF files and Hugging Face folders, in one naming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    files = open_model_files(write_gguf(tmp_path / "m.gguf", architecture="gemma3"))
    assert files.architecture == "gemma3" and files.config["hidden_size"] == HIDDEN


def test_experts_make_it_another_class(tmp_path: Path) -> None:
    files = open_model_files(write_gguf(tmp_path / "m.gguf", llama__expert_count=8))
    assert files.architecture == "MixtralForCausalLM"


def test_rope_scaling_is_told_not_dropped(tmp_path: Path) -> None:
    scaled = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    config = open_model_files(write_gguf(tmp_path / "m.gguf", **scaled)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"llama__embedding_length": None}, "metadata key 'llama.embedding_length' is absent"),
        ({"llama__attention__head_count": 0}, "'llama.attention.head_count' is 0, no positive number"),
        ({"llama__context_length": "long"}, "'llama.context_length' is 'long', no positive number"),
        ({"llama__rope__freq_base": "x"}, "'llama.rope.freq_base' is 'x', no positive number"),
        ({"tokenizer__ggml__eos_token_id": "x"}, "'tokenizer.ggml.eos_token_id' is 'x', no token ID"),
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
    assert files.config["rope_theta"] == 10_000.0 and files.config["tie_word_embeddings"] is False
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
        ({"generation_config__json": {"eos_token_id": [1, "x"]}}, "generation_config.json: 'eos_token_id'"),
        ({"tokenizer_config__json": {"eos_token": "e"}, "tokenizer__json": "{"}, "tokenizer.json: damaged"),
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
