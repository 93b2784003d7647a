"""What a model's folder says of its vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servelite.tokenizer.metadata_files import ModelFileError
from servelite.tokenizer.pooling import read_pooling

MODULES = ["Transformer", "Pooling", "Normalize"]


def folder_of(folder: Path, pooling: dict[str, Any] | None, modules: list[str] = MODULES) -> Path:
    """A folder of sentence-transformers, without the model."""
    paths = {"Pooling": "1_Pooling"}
    listed = [
        {
            "idx": i,
            "name": str(i),
            "path": paths.get(name, ""),
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"embedding_dimension": 4, "pooling_mode": "lasttoken", "include_prompt": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_the_folder_says_which_positions_count(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    folder = folder_of(tmp_path, config)
    assert read_pooling(folder, "auto", encoder=True) == (kind, True)
    assert read_pooling(folder, "last", encoder=True) == ("last", True)  # the flag wins


def test_a_vector_is_normalised_where_a_module_does_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"pooling_mode": "mean"}, MODULES[:2])
    assert read_pooling(folder, "auto", encoder=False) == ("mean", False)


@pytest.mark.parametrize(("encoder", "kind"), [(True, "mean"), (False, "last")])
def test_without_modules_the_kind_of_model_decides(tmp_path: Path, encoder: bool, kind: str) -> None:
    (gguf := tmp_path / "model.gguf").touch()
    for model in (tmp_path, gguf):
        assert read_pooling(model, "auto", encoder=encoder) == (kind, True)
        assert read_pooling(model, "cls", encoder=encoder) == ("cls", True)


@pytest.mark.parametrize(
    ("config", "modules", "error"),
    [
        (
            {"pooling_mode_max_tokens": True},
            MODULES,
            "pooling_mode is 'max_tokens'; supported: mean, cls, lasttoken",
        ),
        ({"pooling_mode": ["mean", "cls"]}, MODULES, r"pooling_mode is \['mean', 'cls'\]"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            MODULES,
            r"pooling_mode is \['mean', 'cls'\]",
        ),
        (None, MODULES, r"1_Pooling/config\.json: the file is missing"),
        (
            {"pooling_mode": "mean"},
            [*MODULES, "Dense"],
            r"modules\.json: the module '.*\.Dense' is not supported",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, config: dict[str, Any] | None, modules: list[str], error: str
) -> None:
    with pytest.raises(ModelFileError, match=error):
        read_pooling(folder_of(tmp_path, config, modules), "auto", encoder=True)
