"""The config.json of published models, as they are on the hub, gives models of the published sizes.

Built on torch's meta device, which allocates nothing. The configs are shortened by the fields that say
nothing of the computation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from servelite.kernels.dispatch import REFERENCE
from servelite.layers.build import Build
from servelite.models.registry import build_model
from servelite.tokenizer.model_files import open_model_files

LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
MIXTRAL_8X7B = MISTRAL_7B | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2,
    "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02, "sliding_window": None,
}  # fmt: skip
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
    "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
    "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B_A3B = QWEN3_0_6B | {
    "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048,
    "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "vocab_size": 262144,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], int, list[int]]] = {
    "Llama 3.2 1B": (LLAMA_3_2_1B, 1_235_814_400, [0]),
    "Mistral 7B 0.1": (MISTRAL_7B, 7_241_732_096, [4096]),
    "Mixtral 8x7B": (MIXTRAL_8X7B, 46_702_792_704, [0]),
    "Qwen2.5 0.5B": (QWEN2_5_0_5B, 494_032_768, [0]),
    "Qwen3 0.6B": (QWEN3_0_6B, 596_049_920, [0]),
    "Qwen3 30B A3B": (QWEN3_30B_A3B, 30_532_122_624, [0]),
    "Gemma 3 1B": (GEMMA_3_1B, 999_885_952, [0, *[512] * 6]),
}
"""With the number of parameters, and the windows of the KV groups."""


@pytest.mark.parametrize("name", MODELS)
def test_a_published_config_is_accepted_and_gives_the_published_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The meta device pulls in torch's compiler, which makes itself a folder at once.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    config, parameters, windows = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = open_model_files(tmp_path)
    with torch.device("meta"):
        model = build_model(files.architecture, files.config, Build(REFERENCE, torch.bfloat16))
    assert sum(slot.tensor.numel() for slot in model.weights()) == parameters
    assert [group.window for group in model.kv_groups] == windows


@pytest.mark.parametrize(
    ("config", "theta"), [(MISTRAL_7B, 1e4), (MIXTRAL_8X7B, 1e6), (QWEN3_0_6B, 1e4), (GEMMA_3_1B, 1e6)]
)
def test_a_config_without_a_rotary_base_gets_its_familys(
    config: dict[str, Any], theta: float, tmp_path: Path
) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "vocab_size": 64}
    own = {name: value for name, value in config.items() if name != "rope_theta"} | small
    heads = {"num_attention_heads": 8, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(own | heads))
    files = open_model_files(tmp_path)
    model: Any = build_model(files.architecture, files.config, Build(REFERENCE, torch.float32))
    rotary = model._rotaries[model._rotary_of[-1]]  # Gemma's last layer sees everything
    assert rotary._frequencies[1] == pytest.approx(theta ** (-2 / 32))
