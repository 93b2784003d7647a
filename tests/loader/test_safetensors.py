"""Hugging Face folders: what is missing, extra, mis-shaped or damaged is named in one line."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from servelite.kernels.dispatch import REFERENCE
from servelite.loader import model as loader
from servelite.loader.model import load_model
from servelite.models.registry import build_model
from servelite.tokenizer.config_limits import LIMITS
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


def test_a_tied_models_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lm_head__weight=torch.zeros(256, 48))
    assert "'lm_head.weight' has shape [256, 48], the config asks for [257, 48]" in load_error(tmp_path)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert load_error(folder).startswith(f"{folder}: neither model.safetensors nor")


def test_pickled_weights_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = load_error(folder)
    assert "pickled weights (pytorch_model.bin) are never read" in text and "convert them" in text


UNREADABLE = "not a readable safetensors file"


def test_a_truncated_file_names_the_first_tensor_that_is_not_whole(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    text = load_error(folder)
    assert text.startswith(f"{file}: {UNREADABLE} (tensor 'model.")
    assert text.endswith("an incomplete download?)")


def written(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "its header runs past the file's end (0 bytes)"),
        (b"\xff" * 64, "its header runs past the file's end (64 bytes)"),
        (b"\x00" * 64, "invalid JSON in header"),
        (b"version https://git-lfs", "its header runs past the file's end"),
        (written({"w": entry([4, 4], 0, 60)}, bytes(60)), "tensor 'w' has 60 bytes for shape [4, 4] of F32"),
        (
            written({"w": entry([4, 4], 0, 64)}, bytes(60)),
            "tensor 'w' ends at byte 64 of the data, there are 60",
        ),
        (
            written({"v": entry([4], 0, 16), "w": entry([2], 12, 20)}, bytes(20)),
            "tensor 'w' begins at byte 12 of the data, the one before it ends at 16",
        ),
        (written({"w": entry([1 << 40, 1 << 40], 0, 64)}, bytes(64)), "tensor 'w' has 64 bytes for shape"),
        (written({"w": entry([4], 0, 1 << 62)}, bytes(16)), "tensor 'w' has 4611686018427387904 bytes"),
        (written({"w": entry([4], 0, 16, "NOPE")}, bytes(16)), "unknown variant `NOPE`"),
        (
            struct.pack("<Q", 200_005) + b'{"a":' + b"[" * 100_000 + b"]" * 100_000,
            "its header is nested too deeply",
        ),
        (written({"w": 7}), "invalid type: integer `7`"),
        (written({"v": entry([4], 0, 16)}, bytes(20)), "file not fully covered"),
    ],
)
def test_a_header_that_lies(folder: Path, content: bytes, says: str) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(content)
    text = load_error(folder)
    assert text.startswith(f"{file}: {UNREADABLE} (") and says in text


def test_a_folder_in_a_files_place(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert load_error(folder) == f"{folder}/model.safetensors: not a regular file"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_llama(tmp_path, shard="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    return tmp_path


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_shards_hold_what_one_file_holds(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = tmp_path_factory.mktemp("whole")
    tiny_llama(whole)
    for slots in zip(
        load_model(open_model_files(sharded), REFERENCE).weights(),
        load_model(open_model_files(whole), REFERENCE).weights(),
        strict=True,
    ):
        assert slots[0].name == slots[1].name and torch.equal(slots[0].tensor, slots[1].tensor)


def test_a_shard_without_a_tensor_that_the_index_says_it_has(sharded: Path) -> None:
    file = sharded / index_of(sharded)[TENSOR]
    kept = {name: tensor for name, tensor in load_file(file).items() if name != TENSOR}
    save_file(kept, file)
    assert load_error(sharded) == (
        f"{file}: tensor '{TENSOR}' is missing, which model.safetensors.index.json says is in this file"
    )


def test_a_copy_in_another_shard_counts_for_nothing(sharded: Path) -> None:
    right = sharded / index_of(sharded)[TENSOR]
    wrong = next(file for file in sharded.glob("model-*.safetensors") if file != right)
    save_file({**load_file(wrong), TENSOR: torch.full((16, 48), 7.0)}, wrong)
    (slot,) = [s for s in load_model(open_model_files(sharded), REFERENCE).weights() if s.name == TENSOR]
    assert torch.equal(slot.tensor, load_file(right)[TENSOR])


def test_a_missing_shard(sharded: Path) -> None:
    file = sharded / index_of(sharded)[TENSOR]
    file.unlink()
    assert load_error(sharded) == f"{file}: the file is missing (model.safetensors.index.json names it)"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(folder: Path, dtype: torch.dtype) -> None:
    file = folder / "model.safetensors"
    halved = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(halved, file)
    for slot in load_model(open_model_files(folder), REFERENCE).weights():
        assert slot.tensor.dtype is torch.float32
        assert torch.equal(slot.tensor, halved[slot.name].to(torch.float32))


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"a": "model-1.safetensors"}, "model-1.safetensors: the file is missing"),
        ({"a": "../model.safetensors"}, "names a file outside the folder: '../model.safetensors'"),
        ({"a": ".."}, "names a file outside the folder: '..'"),
        ({"a": ""}, "names a file outside the folder: ''"),
        ({"a": "x\ny"}, "names no file: 'x\\ny'"),
        ({"a": "x" * 300}, "names no file: 'xxx"),
        (7, "damaged (Expected `object`, got `int`"),
    ],
)
def test_a_bad_index(folder: Path, files: object, named: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert named in load_error(folder)


def test_a_pipe_in_place_of_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert load_error(folder) == f"{folder / 'model.safetensors'}: not a regular file"


def set_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_what_the_file_does_not_hold_takes_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    def build(*args: Any) -> Any:
        model = build_model(*args)
        devices.append(",".join({slot.tensor.device.type for slot in model.weights()}))
        return model

    monkeypatch.setattr(loader, "build_model", build)
    load_model(open_model_files(folder), REFERENCE)
    assert devices == ["meta", "cpu"]
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"):
        devices.clear()
        before = (folder / "config.json").read_text()
        set_config(folder, **{field: LIMITS[field]})
        assert "the config asks for" in load_error(folder)
        assert devices == ["meta"]
        set_config(folder, **{field: LIMITS[field] + 1})
        assert f"config field {field} is {LIMITS[field] + 1}, above the limit" in load_error(folder)
        (folder / "config.json").write_text(before)


def test_no_quantisation_may_be_written_as_null(folder: Path) -> None:
    set_config(folder, quantization_config=None)
    load_model(open_model_files(folder), REFERENCE)


@pytest.mark.parametrize("value", [[], "x", 4, False])
def test_a_quantisation_that_is_no_object(folder: Path, value: object) -> None:
    set_config(folder, quantization_config=value)
    assert load_error(folder) == (
        f"{folder / 'config.json'}: 'quantization_config' is {value!r}, not an object"
    )


def test_quantised_weights_are_refused_by_method(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_error(folder) == f"{folder}: weights quantised by 'gptq' are not supported"
