"""A rank's part of a tensor: equal to that part of the whole, and nothing else is read for it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from servelite.kernels.dispatch import REFERENCE
from servelite.layers.partition import equal_share
from servelite.loader import gguf_weights
from servelite.loader.gguf_dequantize import SUPPORTED
from servelite.loader.gguf_weights import GGUFWeights
from servelite.loader.model import load_model
from servelite.loader.safetensors_weights import SafetensorsWeights
from servelite.loader.weights import WeightSource
from servelite.tokenizer.gguf import BLOCK, GGMLType, read_gguf
from servelite.tokenizer.model_files import open_model_files
from tests.loader.test_gguf_tensors import SCALES, random_blocks, write_gguf
from tests.paged_forward import paged_logits
from tests.rank_threads import run_ranks
from tests.tiny_models import tiny_llama

ROWS, COLUMNS = 12, 1536  # six blocks of the largest kind
MATRIX, VECTOR = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.bias"
PARTS = {
    "all": (0, 0, ROWS),
    "rows": (0, 5, 4),
    "whole blocks": (1, 512, 512),
    "within a block": (1, 260, 9),
    "from within a block to within another": (1, 250, 300),
    "to the end": (1, 1000, 536),
    "one column": (1, 1535, 1),
}
"""Dimension, start and size."""


def save(path: Path, kind: GGMLType) -> GGUFWeights:
    """A matrix and a vector of random weights of the type; the vector float32 where it is of blocks."""
    theirs, random = gguf.GGMLQuantizationType(int(kind)), np.random.default_rng(2)
    writer = gguf.GGUFWriter(path, "qwen2")
    if kind.name in SCALES:
        elements, _ = BLOCK[kind]
        matrix = random_blocks(kind, random)[: ROWS * COLUMNS // elements].reshape(ROWS, -1)
        vector = random.normal(0, 3, 96).astype(np.float32)
        writer.add_tensor("blk.0.attn_q.bias", vector)
    else:
        matrix = gguf.quantize(random.normal(0, 3, (ROWS, COLUMNS)).astype(np.float32), theirs)
        vector = gguf.quantize(random.normal(0, 3, (1, 96)).astype(np.float32), theirs)[0]
        writer.add_tensor("blk.0.attn_q.bias", vector, raw_dtype=theirs)
    writer.add_tensor("blk.0.ffn_down.weight", matrix, raw_dtype=theirs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFWeights(read_gguf(path), {})


def read(source: WeightSource, name: str, dtype: torch.dtype, *part: int) -> torch.Tensor:
    """`part`: dimension, start and size; none: all."""
    shape = list(source.shapes()[name])
    dim, start, size = part or (0, 0, shape[0])
    shape[dim] = size
    out = torch.full(shape, torch.nan, dtype=dtype)
    source.read(name, out, dim, start)
    return out


@pytest.fixture(params=[gguf_weights._BAND, 700, 1], ids=["one band", "bands", "a row a band"])
def band(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_weights, "_BAND", request.param)


@pytest.mark.usefixtures("band")
@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_part_of_a_gguf_tensor_equals_that_part_of_the_whole(
    kind: GGMLType, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = save(tmp_path / "m.gguf", kind)
    packed = gguf.GGUFReader(tmp_path / "m.gguf").tensors[-1]
    assert packed.name == "blk.0.ffn_down.weight" and packed.tensor_type == int(kind)
    whole = torch.from_numpy(gguf.dequantize(packed.data, packed.tensor_type).copy()).to(dtype)
    assert whole.unique().numel() > 100
    for name, (dim, start, size) in PARTS.items():
        part = read(source, MATRIX, dtype, dim, start, size)
        assert torch.equal(part, whole.narrow(dim, start, size)), name
    vector = read(source, VECTOR, dtype)
    assert torch.equal(read(source, VECTOR, dtype, 0, 24, 48), vector[24:72]) and not vector.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_only_the_blocks_of_a_part_are_converted_and_a_band_at_a_time(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "m.gguf", GGMLType.Q4_K)
    elements, size = BLOCK[GGMLType.Q4_K]
    converted: list[int] = []

    def count(kind: GGMLType, raw: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
        converted.append(len(raw) // size * elements)

    monkeypatch.setattr(gguf_weights, "dequantize", count)
    monkeypatch.setattr(gguf_weights, "_BAND", 1024)
    blocks = {"rows": 4 * 6, "whole blocks": ROWS * 2, "within a block": ROWS, "to the end": ROWS * 3}
    for name, expected in blocks.items():
        converted.clear()
        read(source, MATRIX, dtype, *PARTS[name])
        assert sum(converted) == expected * elements, name
        if name != "rows":  # in float32 they need no second place, and are converted at once
            assert max(converted) <= 1024, name


@pytest.mark.usefixtures("band")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_rows_of_a_ranks_heads_are_parted_as_those_of_all(dtype: torch.dtype, tmp_path: Path) -> None:
    """llama.cpp's order of Q's and K's rows is undone head by head."""
    theirs = tiny_llama(tmp_path / "hf", hidden_size=96, head_dim=16)  # 6 heads, 2 of keys
    path = tmp_path / "model.gguf"
    write_gguf(path, theirs, kind=gguf.GGMLQuantizationType.F32)
    files = open_model_files(path)
    assert files.gguf is not None
    source = GGUFWeights(files.gguf, files.config)
    for projection, heads in {"q": 6, "k": 2}.items():
        name = f"model.layers.1.self_attn.{projection}_proj.weight"
        whole = theirs.state_dict()[name].to(dtype)
        assert torch.equal(read(source, name, dtype), whole)
        for rank in range(2):
            share = equal_share(heads, rank, 2).times(16)
            part = read(source, name, dtype, 0, share.start, share.size)
            assert torch.equal(part, whole[share.start : share.start + share.size])


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file_on_two_ranks_runs_as_on_one(kind: str, tmp_path: Path) -> None:
    """Ranks whose part of the intermediate size ends within a block."""
    theirs = tiny_llama(tmp_path / "hf", hidden_size=96, head_dim=16, intermediate_size=160)
    path = tmp_path / "model.gguf"
    write_gguf(path, theirs, kind=gguf.GGMLQuantizationType[kind])
    files, ids = open_model_files(path), list(range(40, 80))
    expected = paged_logits(load_model(files, REFERENCE), ids)
    for logits in run_ranks(2, lambda group: paged_logits(load_model(files, REFERENCE, group=group), ids)):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_part_of_a_safetensors_tensor_equals_that_part_of_the_whole(
    stored: torch.dtype, tmp_path: Path
) -> None:
    matrix, vector = torch.randn(ROWS, COLUMNS).to(stored), torch.randn(96).to(stored)
    save_file({MATRIX: matrix, VECTOR: vector}, tmp_path / "model.safetensors")
    source = SafetensorsWeights(tmp_path)
    for name, (dim, start, size) in PARTS.items():
        part = read(source, MATRIX, torch.float32, dim, start, size)
        assert torch.equal(part, matrix.narrow(dim, start, size).float()), name
    assert torch.equal(read(source, VECTOR, torch.float32, 0, 24, 48), vector[24:72].float())
