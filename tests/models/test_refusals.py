"""What a model's config asks for and no class can do is refused, in one line that names the field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from servelite.kernels.dispatch import REFERENCE
from servelite.layers.build import Build
from servelite.layers.rotary import UnknownScaling
from servelite.loader.model import load_model
from servelite.models.base import CausalModel, ConfigError
from servelite.models.registry import ARCHITECTURES, UnknownArchitecture, build_model
from servelite.tokenizer.model_files import ModelFileError, open_model_files
from tests.tiny_models import tiny_llama

FULL, SLIDING = "full_attention", "sliding_attention"
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def make(architecture: str, **changes: Any) -> CausalModel:
    plain = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": 10,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "sliding_window": 8,
    }
    return build_model(architecture, plain | EXPERTS | changes, Build(REFERENCE))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, "num_key_value_heads 3"),
        ({"num_attention_heads": [4, 2]}, r"num_attention_heads is \[4, 2\]"),
        ({"num_key_value_heads": [1, 1]}, r"num_key_value_heads is \[1, 1\]"),
        ({"head_dim": "8"}, "head_dim is '8'"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"clip_qkv": 8}, "clip_qkv is 8"),
    ],
)
def test_a_config_no_family_can_run_is_refused_by_field(
    architecture: str, change: dict[str, Any], named: str
) -> None:
    make(architecture)
    with pytest.raises(ConfigError, match=named):
        make(architecture, **change)


@pytest.mark.parametrize(
    ("architecture", "change", "named"),
    [
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act is 'gelu': silu"),
        ("LlamaForCausalLM", {"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ("LlamaForCausalLM", {"layer_types": [SLIDING]}, "layer_types is"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window is 0"),
        ("MistralForCausalLM", {"attention_bias": True}, "attention_bias is True"),
        ("MistralForCausalLM", {"layer_types": [FULL]}, "layer_types is"),
        ("Qwen2ForCausalLM", {"use_sliding_window": 1}, "use_sliding_window is 1"),
        ("Qwen2ForCausalLM", {"layer_types": [SLIDING]}, "layer_types is"),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "max_window_layers": "x"},
            "max_window_layers is 'x'",
        ),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": ["chunked"]}, "has 'chunked'"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": [FULL, FULL]}, "each of 1 layers"),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": True, "layer_types": [SLIDING], "sliding_window": None},
            "sliding_window is None",
        ),
        (
            "Qwen3MoeForCausalLM",
            {"num_experts_per_tok": 5},
            "num_experts_per_tok is 5, above num_local_experts 4",
        ),
        ("Qwen3MoeForCausalLM", {"num_experts": 1}, "num_experts_per_tok is 2, above num_experts 1"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ("MixtralForCausalLM", {"num_local_experts": -1}, "num_local_experts is -1"),
        ("Gemma3ForCausalLM", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("Gemma3ForCausalLM", {"sliding_window": None}, "sliding_window is None"),
    ],
)
def test_what_one_family_cannot_run_is_refused_by_field(
    architecture: str, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make(architecture, **change)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_an_unknown_rope_scaling_is_refused_by_name(architecture: str, kind: str) -> None:
    with pytest.raises(UnknownScaling, match=f"type '{kind}' is not supported"):
        make(architecture, rope_scaling={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_a_rope_scaling_without_its_numbers_is_refused(kind: str) -> None:
    with pytest.raises(UnknownScaling, match=kind):
        make("LlamaForCausalLM", rope_scaling={"rope_type": kind})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "rope_parameters is .*one for all layers"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_parameters": 5}, "rope_parameters is 5: not an object"),
        ({"rope_parameters": {"rope_theta": "q"}}, "rope_theta of rope_parameters is 'q'"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta is 10"),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
            "original_max.* is 0,",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": "x"}},
            "original.* is 'x'",
        ),
    ],
)
def test_rope_settings_that_cannot_be_run_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make("LlamaForCausalLM", **change)


@pytest.mark.parametrize("changes", [{SLIDING: {"rope_theta": "q"}}, {FULL: {"rope_theta": "q"}}])
def test_a_rotary_base_by_type_that_is_no_number_is_refused(changes: dict[str, Any]) -> None:
    (kind,) = changes
    with pytest.raises(ConfigError, match=f"rope_theta of rope_parameters {kind} is 'q'"):
        make("Gemma3ForCausalLM", rope_parameters=changes)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("scaling", "field", "value"),
    [
        *[
            (plain, "factor", value)
            for plain in ({"rope_type": "linear"}, LLAMA3, YARN)
            for value in (0, -2.0, "x", True, float("nan"))
        ],
        (LLAMA3, "low_freq_factor", 0),
        (LLAMA3, "high_freq_factor", 1),
        (YARN, "beta_fast", -32),
        (YARN, "beta_slow", "x"),
        (YARN, "attention_factor", "x"),
        (YARN, "truncate", "no"),
        (YARN | {"mscale_all_dim": 1}, "mscale", "x"),
    ],
)
def test_a_rope_scaling_that_cannot_be_used_is_refused_by_field(
    scaling: dict[str, Any], field: str, value: Any
) -> None:
    with pytest.raises(UnknownScaling, match=rf"^{field} of the \w+ rope_scaling is {value!r}: [^\n]+$"):
        make("LlamaForCausalLM", rope_scaling=scaling | {field: value})


def test_the_refusal_names_the_file_in_one_line(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}))
    with pytest.raises(ModelFileError, match=r"^[^\n]*'dynamic' is not supported[^\n]*$"):
        load_model(open_model_files(tmp_path), REFERENCE)


def test_an_unknown_architecture_is_refused_by_name_and_the_known_are_listed() -> None:
    with pytest.raises(UnknownArchitecture) as caught:
        build_model("T5Model", {}, Build(REFERENCE))
    assert "'T5Model'" in str(caught.value)
    assert all(name in str(caught.value) for name in ARCHITECTURES)


def test_naming_the_architectures_needs_no_torch() -> None:
    """The launcher refuses a model before it starts a process."""
    program = "import sys, servelite.models.registry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
