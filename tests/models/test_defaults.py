"""A config.json without a field means what transformers takes it to mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from servelite.kernels.dispatch import REFERENCE
from servelite.layers.build import Build
from servelite.loader.model import load_model
from servelite.models.registry import ARCHITECTURES, build_model
from servelite.tokenizer.model_files import open_model_files
from tests.paged_forward import paged_logits
from tests.tiny_models import EXPERTS, SHAPE, tiny_gemma3, tiny_llama

IDS = torch.randint(0, 257, (12,), generator=torch.Generator().manual_seed(5)).tolist()
SIZES = {key: SHAPE[key] for key in SHAPE if key not in ("initializer_range", "tie_word_embeddings")}
PLAIN = SIZES | EXPERTS | {"rms_norm_eps": 1e-6}
NAMES: Final = {"Gemma3": "Gemma3TextConfig"}
"""Of the config classes; the others' is the family's with "Config" behind it."""


def windows(architecture: str, **changes: Any) -> list[int]:
    """By layer."""
    groups = build_model(architecture, PLAIN | changes, Build(REFERENCE)).kv_groups
    return [window for _, window in sorted((at, group.window) for group in groups for at in group.layers)]


def their_windows(architecture: str, **changes: Any) -> list[int]:
    import transformers

    family = architecture.removesuffix("ForCausalLM")
    config = getattr(transformers, NAMES.get(family, f"{family}Config"))(**(PLAIN | changes))
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    return [window if kind == "sliding_attention" else 0 for kind in types]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": True, "max_window_layers": 1}])
def test_the_window_where_the_config_has_none(architecture: str, changes: dict[str, Any]) -> None:
    assert windows(architecture, **changes) == their_windows(architecture, **changes)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "MixtralForCausalLM"])
def test_null_is_no_window(architecture: str) -> None:
    assert windows(architecture, sliding_window=None) == their_windows(architecture, sliding_window=None)
    assert windows(architecture, sliding_window=None) == [0, 0, 0]


def test_mistral_sees_4096_tokens_unless_it_says_otherwise() -> None:
    assert windows("MistralForCausalLM") == [4096] * 3


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("stated", [False, True])
def test_a_head_in_a_tied_models_file(own: bool, stated: bool, tmp_path: Path) -> None:
    """It is used where it is another than the embedding, and no memory is spent on it where it is not."""
    theirs = tiny_llama(tmp_path, tie_word_embeddings=True) if stated else tiny_gemma3(tmp_path, window=8)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    if not stated:  # Gemma's default
        del config["tie_word_embeddings"]
        path.write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    if own:
        head = head.flip(0)
    save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})

    model = load_model(open_model_files(tmp_path), REFERENCE)
    with torch.inference_mode():
        expected = type(theirs).from_pretrained(tmp_path)(torch.tensor([IDS])).logits[0]
        assert own == (not torch.allclose(expected, theirs(torch.tensor([IDS])).logits[0]))
    torch.testing.assert_close(paged_logits(model, IDS), expected, atol=1e-4, rtol=0)
    assert own == ("lm_head.weight" in [slot.name for slot in model.weights()])
