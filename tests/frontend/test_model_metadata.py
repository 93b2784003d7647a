"""What settings put in the place of the model's own tokenizer, chat template and sampling defaults."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from servelite.config import Settings
from servelite.frontend.model_metadata import read_metadata
from servelite.tokenizer.model_files import ModelFileError
from tests.tokenizer.small_folder import save, sentencepiece


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "m", sentencepiece(), bos_token="<s>", eos_token="</s>", chat_template="own")


def read(folder: Path, **settings: Any) -> Any:
    return read_metadata(Settings(model=str(folder), **settings))


def generation_config(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def test_sampling_defaults_are_the_models(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    generation_config(folder, temperature=0.6, top_k=20, top_p=None, do_sample=True, max_new_tokens=5)
    with caplog.at_level(logging.INFO):
        assert read(folder).sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert "temperature 0.6, top_k 20" in caplog.text and "--generation-config none" in caplog.text
    assert read(folder, generation_config="none").sampling_defaults == {}


def test_another_folders_defaults(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ModelFileError, match=r"generation_config\.json: no such file"):
        read(folder, generation_config=str(other))
    generation_config(other, min_p=0.1)
    assert read(folder, generation_config=str(other)).sampling_defaults == {"min_p": 0.1}


def test_a_default_out_of_bounds_is_named(folder: Path) -> None:
    generation_config(folder, temperature=7)
    with pytest.raises(ModelFileError, match=r"temperature is 7.*--generation-config none"):
        read(folder)
    assert read(folder, generation_config="none").sampling_defaults == {}


def test_a_template_from_a_file(folder: Path, tmp_path: Path) -> None:
    assert read(folder).files.chat_template == "own"
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert read(folder, chat_template=str(tmp_path / "t.jinja")).files.chat_template == "{{ messages }}"
    with pytest.raises(ModelFileError, match=r"none\.jinja: --chat-template cannot be read"):
        read(folder, chat_template=str(tmp_path / "none.jinja"))
    os.mkfifo(tmp_path / "pipe.jinja")
    with pytest.raises(ModelFileError, match=r"pipe\.jinja: not a regular file"):
        read(folder, chat_template=str(tmp_path / "pipe.jinja"))


def test_a_tokenizer_from_elsewhere(folder: Path, tmp_path: Path, demo_model: Path) -> None:
    other = save(tmp_path / "t", sentencepiece(), bos_token="<s>", eos_token="<unk>", chat_template="its")
    (other / "config.json").unlink()  # a tokenizer's folder need not be a model's
    metadata = read(folder, tokenizer=str(other))
    assert metadata.files.chat_template == "its"
    assert metadata.tokenizer.eos_token == "<unk>"
    assert set(metadata.tokenizer.eos_token_ids) == {0, 2}  # either ends an answer
    assert read(folder, tokenizer=str(demo_model)).tokenizer.special_ids >= {1, 2}
    with pytest.raises(ModelFileError, match="no such file or folder"):
        read(folder, tokenizer=str(tmp_path / "none"))
