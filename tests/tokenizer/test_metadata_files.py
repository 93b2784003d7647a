"""The one way a model's files are opened: regular files of a bounded size, JSON of a bounded depth."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from servelite.tokenizer.gguf import read_gguf
from servelite.tokenizer.metadata_files import (
    TEMPLATE_LIMIT,
    ModelFileError,
    brief,
    decode_json,
    open_regular,
    read_whole,
)
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import load_tokenizer
from tests.tokenizer.test_model_files import CONFIG, folder

DEEP = "[" * 100_000 + "]" * 100_000


def test_only_regular_files_are_opened_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("pipe", "device", "folder", "socket"):
            with pytest.raises(ModelFileError, match=f"{name}: not a regular file$"):
                open_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")


def test_a_link_to_a_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    assert read_whole(tmp_path / "link", 5) == b"12345"


def test_what_is_larger_than_its_limit_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)  # which takes no disk, and would take a tebibyte of memory
    with pytest.raises(ModelFileError, match=f"config.json: {1 << 40} bytes, above the limit of 100 "):
        read_whole(file, 100)


def test_json_that_is_nested_too_deeply_is_one_line() -> None:
    for kind in (object, dict[str, Any]):
        with pytest.raises(ModelFileError, match=r"^m\.json: nested too deeply$"):
            decode_json(Path("m.json"), ('{"a":' + DEEP + "}").encode(), kind)


def test_a_value_in_an_error_is_short() -> None:
    for value in ([1] * 100_000, "x" * 100_000, 10**3000, {"a": "b" * 100_000}):
        assert len(brief(value)) < 200
    assert brief("as it is") == "'as it is'"


FILES = ("config__json", "generation_config__json", "tokenizer_config__json", "tokenizer__json")


@pytest.mark.parametrize("name", [*FILES, "chat_template__jinja", "chat_template__json"])
def test_a_pipe_among_a_models_files_is_refused(tmp_path: Path, name: str) -> None:
    folder(tmp_path, tokenizer_config__json={"eos_token": "e"})
    pipe = tmp_path / name.replace("__", ".")
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    with pytest.raises(ModelFileError, match=f"{pipe.name}: not a regular file"):
        open_model_files(tmp_path)


def test_a_pipe_in_place_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=r"m\.gguf: not a regular file"):
        read_gguf(tmp_path / "m.gguf")


def test_a_pipe_that_transformers_would_wait_for_is_refused(tmp_path: Path) -> None:
    folder(tmp_path)
    os.mkfifo(tmp_path / "vocab.json")
    with pytest.raises(ModelFileError, match=r"vocab\.json: not a regular file"):
        load_tokenizer(open_model_files(tmp_path))


@pytest.mark.parametrize("name", FILES)
def test_deep_nesting_in_a_models_files_is_refused(tmp_path: Path, name: str) -> None:
    files: dict[str, Any] = {"tokenizer_config__json": {"eos_token": "e"}, name: '{"a":' + DEEP + "}"}
    with pytest.raises(ModelFileError, match=name.replace("__", ".") + ": nested too deeply"):
        open_model_files(folder(tmp_path, **files))


def test_a_chat_template_has_a_limit_wherever_it_is(tmp_path: Path) -> None:
    text = "x" * (TEMPLATE_LIMIT + 1)
    for files in ({"tokenizer_config__json": {"chat_template": text}}, {"chat_template__jinja": text}):
        with pytest.raises(ModelFileError, match=f"above the limit of {TEMPLATE_LIMIT}"):
            open_model_files(folder(tmp_path, config__json=CONFIG, **files))
