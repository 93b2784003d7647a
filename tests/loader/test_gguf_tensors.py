"""GGUF tensors: every supported type against the `gguf` package, names, the permutation, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from servelite.kernels.dispatch import REFERENCE
from servelite.loader.gguf_dequantize import SUPPORTED, dequantize
from servelite.loader.gguf_names import hugging_face_name
from servelite.loader.gguf_weights import GGUFWeights
from servelite.loader.model import load_model
from servelite.tokenizer.gguf import BLOCK, GGMLType, read_gguf
from servelite.tokenizer.model_files import ModelFileError, open_model_files
from tests.paged_forward import paged_logits
from tests.tiny_models import tiny_llama

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor, written apart from the loader's own table."""
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in outer:
        return f"{outer[stem]}.weight"
    _, _, number, rest = stem.split(".", 3)
    return f"blk.{number}.{LAYER_NAMES[rest]}.weight"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K rows: the halves of each head take turns."""
    out = np.empty_like(weight)
    dim = len(weight) // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + dim // 2 + i]
    return out


UNSUPPORTED = gguf.GGMLQuantizationType.IQ4_NL  # the package does not quantise to it either


def zeros(value: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The bytes of a matrix of that size, all zero."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    return np.zeros((len(value), value.shape[1] // elements * size), np.uint8)


def write_gguf(path: Path, model: object, *, kind: gguf.GGMLQuantizationType, skip: str = "") -> None:
    """Save a transformers Llama as a GGUF file, its matrices as `kind`, the tensor `skip` left out."""
    config = model.config  # type: ignore[attr-defined]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    for name, tensor in model.state_dict().items():  # type: ignore[attr-defined]
        if name == skip:
            continue
        value = tensor.numpy()
        if "q_proj" in name:
            value = interleave(value, config.num_attention_heads)
        if "k_proj" in name:
            value = interleave(value, config.num_key_value_heads)
        if value.ndim == 1:
            writer.add_tensor(gguf_name(name), value)
        else:
            packed = zeros(value, kind) if kind == UNSUPPORTED else gguf.quantize(value, kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Where the float16 scales of a block lie, by type.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(kind: GGMLType, random: np.random.Generator) -> np.ndarray:
    """Blocks of any bits, [rows, bytes] uint8: more than one tile holds; no NaN among the scales."""
    elements, size = BLOCK[kind]
    blocks = random.integers(0, 256, ((1 << 20) // elements + 3, size), dtype=np.uint8)
    for at in SCALES[kind.name]:
        blocks[:, at : at + 2] = random.normal(0, 1, len(blocks)).astype("<f2")[:, None].view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_dequantising_equals_the_gguf_package_bit_for_bit(kind: GGMLType) -> None:
    random = np.random.default_rng(1)
    theirs = gguf.GGMLQuantizationType(int(kind))
    if kind.name in SCALES:
        packed = random_blocks(kind, random)
    else:
        packed = gguf.quantize(random.normal(0, 3, (700, 1024)).astype(np.float32), theirs)
    expected = gguf.dequantize(packed, theirs).reshape(-1)
    out = np.empty(expected.size, np.float32)
    dequantize(kind, packed.reshape(-1).view(np.uint8), out)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
    assert np.unique(out).size > 1000


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_1"])
def test_a_gguf_file_runs_as_transformers_runs_the_same_weights(kind: str, tmp_path: Path) -> None:
    theirs = tiny_llama(tmp_path / "hf", hidden_size=96, head_dim=16)
    quantisation = gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "model.gguf", theirs, kind=quantisation)
    with torch.inference_mode():
        for weight in theirs.parameters():
            if weight.dim() == 2:
                packed = gguf.quantize(weight.numpy(), quantisation)
                weight.copy_(torch.from_numpy(gguf.dequantize(packed, quantisation)))
        ids = list(range(40, 80))
        expected = theirs(torch.tensor([ids])).logits[0]
    model = load_model(open_model_files(tmp_path / "model.gguf"), REFERENCE)
    torch.testing.assert_close(paged_logits(model, ids), expected, atol=1e-4, rtol=0)


def test_the_demo_models_tensors_equal_the_gguf_packages(demo_model: Path) -> None:
    files = open_model_files(demo_model)
    assert files.gguf is not None
    ours = GGUFWeights(files.gguf, files.config)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(demo_model).tensors}
    assert len(ours.shapes()) == len(theirs) == 272
    for name in ("blk.3.ffn_down.weight", "blk.29.attn_v.weight", "output_norm.weight", "token_embd.weight"):
        tensor = theirs[name]
        out = torch.empty(ours.shapes()[hugging_face_name("llama", name)])
        ours.read(hugging_face_name("llama", name), out)
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(out.numpy(), expected.reshape(out.shape))


def test_a_type_that_is_not_supported_is_refused_by_tensor_and_type(tmp_path: Path) -> None:
    theirs = tiny_llama(tmp_path / "hf", hidden_size=96, head_dim=16)
    path = tmp_path / "model.gguf"
    write_gguf(path, theirs, kind=UNSUPPORTED)
    with pytest.raises(ModelFileError) as caught:
        load_model(open_model_files(path), REFERENCE)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: tensor '")
    assert "is of type IQ4_NL; supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0" in text


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    theirs = tiny_llama(tmp_path / "hf")
    path = tmp_path / "model.gguf"
    write_gguf(path, theirs, kind=gguf.GGMLQuantizationType.F32, skip="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelFileError, match=r"model\.gguf: tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_model(open_model_files(path), REFERENCE)


def test_a_name_that_is_not_known_stays_as_it_is() -> None:
    assert hugging_face_name("qwen2", "blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"
    assert hugging_face_name("llama", "blk.0.ssm_a") == "blk.0.ssm_a"
    assert hugging_face_name("llama", "blk.0.post_ffw_norm.weight") == "blk.0.post_ffw_norm.weight"


def test_one_name_stands_for_different_norms() -> None:
    """GGUF's "ffn_norm" is what stands before the feed-forward; Hugging Face calls that by its place."""
    name = "blk.3.ffn_norm.weight"
    assert hugging_face_name("llama", name) == "model.layers.3.post_attention_layernorm.weight"
    assert hugging_face_name("gemma3", name) == "model.layers.3.pre_feedforward_layernorm.weight"


def test_bfloat16_is_the_rounded_float32(demo_model: Path) -> None:
    files = open_model_files(demo_model)
    assert files.gguf is not None
    source = GGUFWeights(files.gguf, files.config)
    for name in ("model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.weight", "model.norm.weight"):
        whole = torch.empty(source.shapes()[name])
        source.read(name, whole)
        rounded = torch.empty(source.shapes()[name], dtype=torch.bfloat16)
        source.read(name, rounded)
        assert torch.equal(rounded, whole.to(torch.bfloat16))


def test_a_truncated_file_is_an_error_of_one_line(demo_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    shutil.copyfile(demo_model, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    with pytest.raises(ModelFileError, match=r"^[^\n]*cut\.gguf: [^\n]*$"):
        read_gguf(path)


@pytest.mark.slow
def test_gemmas_tensors_equal_the_gguf_packages(gemma_model: Path) -> None:
    """One of each type, and each norm, which lose the 1 that GGUF adds."""
    files = open_model_files(gemma_model)
    assert files.gguf is not None
    ours = GGUFWeights(files.gguf, files.config)
    seen = set()
    for tensor in gguf.GGUFReader(gemma_model).tensors:
        name = hugging_face_name("gemma3", tensor.name)
        assert name != tensor.name and ours.shapes()[name] == tuple(int(n) for n in reversed(tensor.shape))
        if tensor.name == "token_embd.weight" or (tensor.tensor_type in seen and "norm" not in name):
            continue  # the table is of a type that others have too, and takes the package half a minute
        seen.add(tensor.tensor_type)
        out = torch.empty(ours.shapes()[name])
        ours.read(name, out)
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(out.shape)
        np.testing.assert_array_equal(out.numpy(), expected - ("norm" in name))
    assert {kind.name for kind in seen} == {"F32", "Q5_0", "Q4_K", "Q8_0", "Q6_K"}
