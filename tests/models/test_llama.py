"""The Llama family against transformers on tiny random weights, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from servelite.kernels.dispatch import REFERENCE
from servelite.layers.rotary import UnknownScaling
from servelite.loader.model import load_model
from servelite.models.base import ConfigError
from servelite.models.llama import LlamaForCausalLM
from servelite.models.registry import UnknownArchitecture, build_model
from servelite.tokenizer.model_files import ModelFileError, open_model_files
from tests.paged_forward import paged_logits
from tests.tiny_models import tiny_llama, tiny_windowed_llama

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one head of keys": {"num_key_value_heads": 1},
    "a head of keys for each": {"num_key_value_heads": 6},
    "tied": {"tie_word_embeddings": True},
    "rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "rope llama3": {"rope_parameters": LLAMA3},
}
STEPS = {"whole": (70,), "chunks": (16, 16, 16, 16, 6), "decodes": (33, *[1] * 37), "odd": (1, 7, 1, 61)}
IDS = torch.randint(0, 257, (70,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    theirs = tiny_llama(tmp_path, **VARIANTS[variant])
    model = load_model(open_model_files(tmp_path), REFERENCE)
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS])).logits[0]
    assert expected.std() > 1  # the comparison below would mean little on flat logits
    for name, sizes in STEPS.items():
        ours = paged_logits(model, IDS, sizes, block_size=8)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_a_sharded_checkpoint_in_half_precision_loads(tmp_path: Path) -> None:
    theirs = tiny_llama(tmp_path / "whole")
    with torch.inference_mode():
        for weight in theirs.parameters():
            weight.copy_(weight.bfloat16())
        expected = theirs(torch.tensor([IDS])).logits[0]
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    model = load_model(open_model_files(tmp_path / "shards"), REFERENCE)
    torch.testing.assert_close(paged_logits(model, IDS), expected, atol=1e-4, rtol=0)


def config(**changes: Any) -> dict[str, Any]:
    plain = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": 10,
        "rms_norm_eps": 1e-5,
    }
    return plain | changes


WINDOWED = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, "num_key_value_heads 3"),
        ({"num_attention_heads": [4, 2]}, r"num_attention_heads is \[4, 2\]"),
        ({"num_key_value_heads": [1, 1]}, r"num_key_value_heads is \[1, 1\]"),
        ({"head_dim": "8"}, "head_dim is '8'"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"layer_types": ["chunked_attention"]}, "layer_types has 'chunked_attention'"),
        ({"layer_types": ["full_attention"] * 2}, "not one type a layer"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is None"),
        (WINDOWED, "2 layers of full_attention and 1 of sliding_attention"),
    ],
)
def test_a_config_it_cannot_run_is_refused_by_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LlamaForCausalLM(config(**change), REFERENCE)


def test_an_unknown_rope_scaling_is_refused_by_name(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"default"', '"yarn"')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"^[^\n]*'yarn' is not supported[^\n]*$"):
        load_model(open_model_files(tmp_path), REFERENCE)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_a_rope_scaling_without_its_numbers_is_refused(kind: str) -> None:
    with pytest.raises(UnknownScaling, match=kind):
        LlamaForCausalLM(config(rope_scaling={"rope_type": kind}), REFERENCE)


def test_an_unknown_architecture_is_refused_by_name_and_the_known_are_listed() -> None:
    with pytest.raises(UnknownArchitecture, match="'BertModel'; supported: LlamaForCausalLM"):
        build_model("BertModel", {}, REFERENCE)


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("window", [1, 5, 16, 17, 64, 200])
def test_windowed_layers_see_only_their_window(window: int, block_size: int, tmp_path: Path) -> None:
    """Whatever stands in the blocks that are out of it."""
    theirs = tiny_windowed_llama(tmp_path, window=window)
    model = load_model(open_model_files(tmp_path), REFERENCE)
    assert [(g.kind, g.layers, g.window) for g in model.kv_groups] == [
        ("full", (0, 2), 0),
        ("window", (1, 3), window),
    ]
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS])).logits[0]
    for name, sizes in STEPS.items():
        ours = paged_logits(model, IDS, sizes, block_size)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
