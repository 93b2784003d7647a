"""Hugging Face folders: what is missing, extra, mis-shaped or damaged is named in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from servelite.kernels.dispatch import REFERENCE
from servelite.loader.model import load_model
from servelite.tokenizer.model_files import ModelFileError, open_model_files
from tests.tiny_models import tiny_llama

TENSOR = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama(tmp_path)
    return tmp_path


def load_error(folder: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_model(open_model_files(folder), REFERENCE)
    text = str(caught.value)
    assert "\n" not in text
    return text


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change or (None) drop tensors of the checkpoint; keys have __ for dots."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, file)


def key(name: str) -> str:
    return name.replace(".", "__")


def test_a_missing_tensor(folder: Path) -> None:
    rewrite(folder, **{key(TENSOR): None})
    assert load_error(folder) == f"{folder}/model.safetensors: tensor '{TENSOR}' is missing"


def test_an_extra_tensor(folder: Path) -> None:
    extra = "model.layers.1.self_attn.k_proj.bias"
    rewrite(folder, **{key(extra): torch.zeros(16)})
    assert load_error(folder) == (
        f"{folder}/model.safetensors: tensor '{extra}' is not one of this architecture's"
    )


def test_a_tensor_of_another_shape(folder: Path) -> None:
    rewrite(folder, **{key(TENSOR): torch.zeros(48, 16)})
    assert load_error(folder) == (
        f"{folder}/model.safetensors: tensor '{TENSOR}' has shape [48, 16], the config asks for [16, 48]"
    )


def test_a_tensor_of_a_type_that_is_not_supported(folder: Path) -> None:
    rewrite(folder, **{key(TENSOR): torch.zeros((16, 48), dtype=torch.int8)})
    assert load_error(folder) == (
        f"{folder}/model.safetensors: tensor '{TENSOR}' is of type I8; supported: F32, F16, BF16"
    )


def test_what_old_checkpoints_hold_besides_is_passed_over(folder: Path) -> None:
    rewrite(folder, **{key("model.layers.0.self_attn.rotary_emb.inv_freq"): torch.zeros(4)})
    load_model(open_model_files(folder), REFERENCE)


def test_a_tied_head_given_twice_is_passed_over(tmp_path: Path) -> None:
    tiny_llama(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lm_head__weight=torch.zeros(257, 48))
    load_model(open_model_files(tmp_path), REFERENCE)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert load_error(folder).startswith(f"{folder}: neither model.safetensors nor")


def test_a_damaged_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00" * 64)
    assert load_error(folder).startswith(f"{folder}/model.safetensors: not a readable safetensors file")


def test_a_truncated_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert load_error(folder).startswith(f"{folder}/model.safetensors: not a readable safetensors file")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"a": "model-1.safetensors"}, "model-1.safetensors: the file is missing"),
        ({"a": "../model.safetensors"}, "names a file outside the folder: '../model.safetensors'"),
        (7, "cannot be read"),
    ],
)
def test_a_bad_index(folder: Path, files: object, named: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert named in load_error(folder)


def test_quantised_weights_are_refused_by_method(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_error(folder) == f"{folder}: weights quantised by 'gptq' are not supported"
