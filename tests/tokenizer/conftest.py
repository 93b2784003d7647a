"""The demo model's tokenizer and chat template, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from servelite.tokenizer.chat_template import ChatTemplate
from servelite.tokenizer.model_files import ModelFiles, open_model_files
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.small_folder import save, sentencepiece


@pytest.fixture(scope="session")
def demo_files(demo_model: Path) -> ModelFiles:
    return open_model_files(demo_model)


@pytest.fixture(scope="session")
def tokenizer(demo_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(demo_files)


@pytest.fixture(scope="session")
def template(demo_files: ModelFiles, tokenizer: Tokenizer) -> ChatTemplate:
    assert demo_files.chat_template is not None
    return ChatTemplate(
        demo_files.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.special_tokens,
    )


@pytest.fixture(scope="session")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer in the manner of Llama 2, from a folder."""
    path = save(tmp_path_factory.mktemp("spm"), sentencepiece(), bos_token="<s>", eos_token="</s>")
    return load_tokenizer(open_model_files(path))
