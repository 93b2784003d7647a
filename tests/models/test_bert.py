"""BERT against transformers: tiny random weights first, then a real sentence encoder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from servelite.config import SettingError
from servelite.kernels.attention_batch import build_attention_batch
from servelite.kernels.dispatch import REFERENCE
from servelite.layers.build import Build
from servelite.layers.step_context import StepContext
from servelite.loader.model import load_model
from servelite.models.base import ConfigError, Model
from servelite.models.registry import build_model
from servelite.tokenizer.model_files import ModelFileError, open_model_files
from servelite.tokenizer.tokenizer import load_tokenizer
from tests.rank_threads import ThreadRank, run_ranks
from tests.tiny_models import SHAPE

SIZES = {
    name: SHAPE[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
}
SIZES |= {"num_attention_heads": 6, "max_position_embeddings": 64, "initializer_range": 0.3}
LENGTHS = (5, 64, 1, 17)
TEXTS = [torch.randint(0, 257, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


def tiny_bert(folder: Path, *, headed: bool = False, **changes: Any) -> Any:
    """Save a random BERT to `folder`, with its language model's head or without; returns transformers'."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**(SIZES | changes))
    model = (transformers.BertForMaskedLM if headed else transformers.BertModel)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # made as zeros or ones, which would hide a norm or bias left out
                weight.add_(torch.randn(weight.shape) * (0.5 if name.endswith("bias") else 0.1))
    model.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(described))
    return model.bert if headed else model


@torch.inference_mode()
def encoded(model: Model, texts: Sequence[list[int]], padding: int = 0) -> list[Tensor]:
    """The last hidden states of texts that share a step, which is padded to more tokens than they have."""
    lengths = [len(text) for text in texts]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    batch = build_attention_batch(starts, np.zeros(len(texts)), np.zeros((len(texts), 1)), 16)
    positions = torch.cat([*map(torch.arange, lengths), torch.zeros(padding, dtype=torch.int64)])
    ids = torch.tensor([token for text in texts for token in text] + [0] * padding)
    hidden = model.forward(model.embed(ids), StepContext(positions, (batch,), ()))
    return list(hidden[: starts[-1]].split(lengths))


@torch.inference_mode()
def their_hidden(theirs: Any, ids: list[int]) -> Tensor:
    return theirs(torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.parametrize("headed", [False, True])
def test_hidden_states_equal_those_of_transformers(tmp_path: Path, headed: bool) -> None:
    """Four texts in one step, none of which sees another; names with `bert.` before them, or without."""
    theirs = tiny_bert(tmp_path, headed=headed)
    assert all(
        name.startswith(("bert.", "cls.")) is headed for name in load_file(tmp_path / "model.safetensors")
    )
    ours = load_model(open_model_files(tmp_path), REFERENCE)
    for padding in (0, 3):
        for ids, hidden in zip(TEXTS, encoded(ours, TEXTS, padding), strict=True):
            expected = their_hidden(theirs, ids)
            assert expected.std() > 0.5
            torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)


def test_ranks_compute_what_one_does(tmp_path: Path) -> None:
    tiny_bert(tmp_path)
    files = open_model_files(tmp_path)
    alone = encoded(load_model(files, REFERENCE), TEXTS)

    def rank(group: ThreadRank) -> list[Tensor]:
        return encoded(load_model(files, REFERENCE, group=group), TEXTS)

    for part in run_ranks(2, rank):
        for ours, expected in zip(part, alone, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_ranks_that_heads_cannot_be_divided_by_are_refused(tmp_path: Path) -> None:
    tiny_bert(tmp_path)
    with pytest.raises(SettingError, match=r"--tp is 4, .*num_attention_heads.* 6"):
        build_model("BertModel", SIZES, Build(REFERENCE, group=ThreadRank(0, 4)))


@pytest.mark.parametrize(
    "field",
    [
        {"hidden_act": "relu"},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"num_attention_heads": 5},
    ],
    ids=str,
)
def test_what_the_config_asks_for_and_is_not_done_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"config field {next(iter(field))} is"):
        build_model("BertModel", SIZES | field, Build(REFERENCE))


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    tiny_bert(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.layer.2.output.dense.bias"]
    save_file(tensors, path)
    with pytest.raises(ModelFileError, match=r"'bert\.encoder\.layer\.2\.output\.dense\.bias' is missing"):
        load_model(open_model_files(tmp_path), REFERENCE)


@pytest.mark.real_model
def test_the_real_encoder_computes_what_transformers_does(minilm_model: Path, tmp_path: Path) -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    import transformers

    files = open_model_files(minilm_model)
    tokenizer, ours = load_tokenizer(files), load_model(files, REFERENCE)
    theirs = transformers.AutoModel.from_pretrained(minilm_model, local_files_only=True).eval()
    reference = transformers.AutoTokenizer.from_pretrained(minilm_model, local_files_only=True)
    texts = ["The cat sat on the mat.", "Ünïcödé, 東京 & emoji 🙂 unbelievably", "x", "word " * 500]
    ids = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    assert ids == [reference(text).input_ids for text in texts]
    for part, hidden in zip(ids, encoded(ours, ids), strict=True):
        torch.testing.assert_close(hidden, their_hidden(theirs, part), atol=1e-4, rtol=0)
