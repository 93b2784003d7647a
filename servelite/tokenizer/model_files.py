"""What a model's files say about it, in one shape whatever their format.

A model is a GGUF file or a Hugging Face folder. Either way its configuration comes out in the naming
of Hugging Face's `config.json`; weights and vocabularies are not touched here, so this is quick and
needs no torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from servelite.tokenizer.config_limits import check_sizes
from servelite.tokenizer.gguf import GGUFFile, read_gguf
from servelite.tokenizer.gguf_config import config_from_gguf
from servelite.tokenizer.metadata_files import (
    JSON_LIMIT,
    TEMPLATE_LIMIT,
    TOKENIZER_LIMIT,
    ModelFileError,
    brief,
    decode_json,
    read_whole,
)

__all__ = ["ModelFileError", "ModelFiles", "open_model_files", "read_generation_config", "with_tokenizer"]

_GGUF_EOS_KEYS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_GGUF_BOS_KEY: Final = "tokenizer.ggml.bos_token_id"
_LENGTH_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length")


@dataclass(frozen=True)
class ModelFiles:
    """A model's metadata; `config` and `generation_config` are in Hugging Face's naming."""

    path: Path
    format: str  # "gguf" or "hf"
    config: dict[str, Any]
    chat_template: str | None
    eos_token_ids: tuple[int, ...]  # every ID that ends an answer, ascending
    max_model_len: int  # tokens
    architecture: str  # Hugging Face's class name, or GGUF's own name where it has none here
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)  # empty for GGUF
    gguf: GGUFFile | None = None


def open_model_files(path: str | os.PathLike[str]) -> ModelFiles:
    """Read the metadata of a GGUF file or of a Hugging Face folder.

    Raises:
        ModelFileError: nothing is there, it is neither, or it is damaged or incomplete.
    """
    path = Path(path)
    if os.path.isdir(path):
        return _open_folder(path)
    if not os.path.exists(path):
        raise ModelFileError(path, "no such file or folder")
    return _open_gguf(path)


def with_tokenizer(files: ModelFiles, path: Path) -> ModelFiles:
    """A model with the tokenizer of another GGUF file or folder, and its chat template where it has one.

    The folder needs no config.json; whatever ends an answer with either tokenizer ends it.

    Raises:
        ModelFileError: nothing is there, or it is damaged.
    """
    if os.path.isdir(path):
        tokenizer_config = _read_json(path / "tokenizer_config.json") or {}
        eos = _tokenizer_eos(path, tokenizer_config)
        template = _folder_template(path, tokenizer_config)
        files = replace(files, path=path, gguf=None, tokenizer_config=tokenizer_config)
    else:
        other = open_model_files(path)
        eos, template = set(other.eos_token_ids), other.chat_template
        files = replace(files, path=path, gguf=other.gguf, tokenizer_config={})
    return replace(
        files,
        chat_template=files.chat_template if template is None else template,
        eos_token_ids=tuple(sorted({*files.eos_token_ids, *eos})),
    )


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The generation_config.json of a folder.

    Raises:
        ModelFileError: there is none, or it is damaged.
    """
    path = folder / "generation_config.json"
    config = _read_json(path)
    if config is None:
        raise ModelFileError(path, "no such file")
    return config


# ---------------------------------------------------------------- GGUF


def _open_gguf(path: Path) -> ModelFiles:
    gguf = read_gguf(path)
    config = config_from_gguf(gguf)
    template = gguf.metadata.get("tokenizer.chat_template")
    size = config["vocab_size"]
    eos = {_gguf_id(gguf, key, size) for key in _GGUF_EOS_KEYS if key in gguf.metadata}
    if _GGUF_BOS_KEY in gguf.metadata:
        _gguf_id(gguf, _GGUF_BOS_KEY, size)
    return ModelFiles(
        path=path,
        format="gguf",
        config=config,
        chat_template=_template(path, template),
        eos_token_ids=tuple(sorted(eos)),
        max_model_len=config["max_position_embeddings"],
        architecture=config["architectures"][0],
        gguf=gguf,
    )


def _gguf_id(gguf: GGUFFile, key: str, size: int) -> int:
    value = gguf.metadata[key]
    if type(value) is not int or not 0 <= value < size:
        raise ModelFileError(
            gguf.path, f"metadata key {key!r} is {brief(value)}, no token ID (0 to {size - 1})"
        )
    return value


# ---------------------------------------------------------------- Hugging Face folders


_ID: Final = re.compile(r"[0-9]{1,9}")
_ID_LIMIT: Final = 1 << 31  # token IDs are int32 in places


class _AddedToken(msgspec.Struct):
    id: Annotated[int, msgspec.Meta(ge=0, lt=_ID_LIMIT)]
    content: str


class _TokenizerJson(msgspec.Struct):
    """The only part of tokenizer.json read here; the vocabulary is skipped over, not built."""

    added_tokens: list[_AddedToken] = []


def _open_folder(path: Path) -> ModelFiles:
    config = _read_json(path / "config.json")
    if config is None:
        raise ModelFileError(path, "no config.json in this folder, and it is no GGUF file")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelFileError(path / "config.json", "'architectures' is absent or empty")
    config = _complete(config)
    check_sizes(path / "config.json", config)
    # A model of several parts keeps it with the text's: such a one is refused by its architecture's name.
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, dict) else {})
    length = next((place[key] for place in places for key in _LENGTH_KEYS if place.get(key)), None)
    if type(length) is not int or length <= 0:
        raise ModelFileError(path / "config.json", f"none of {', '.join(_LENGTH_KEYS)} is a positive integer")
    generation_config = _read_json(path / "generation_config.json") or {}
    tokenizer_config = _read_json(path / "tokenizer_config.json") or {}
    eos = _ids(path / "config.json", config.get("eos_token_id"))
    eos |= _ids(path / "generation_config.json", generation_config.get("eos_token_id"))
    eos |= _tokenizer_eos(path, tokenizer_config)
    return ModelFiles(
        path=path,
        format="hf",
        config=config,
        generation_config=generation_config,
        tokenizer_config=tokenizer_config,
        chat_template=_folder_template(path, tokenizer_config),
        eos_token_ids=tuple(sorted(eos)),
        max_model_len=length,
        architecture=architectures[0],
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no file."""
    try:
        value = decode_json(path, read_whole(path, JSON_LIMIT), object)
    except FileNotFoundError:
        return None
    if not isinstance(value, dict):
        raise ModelFileError(path, "not a JSON object")
    return value


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """Fill in what writers of config.json leave out, by transformers' own rules.

    transformers 5 writes RoPE settings as `rope_parameters`; they come out under the older names too.
    """
    config = dict(config)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and heads > 0:
        if config.get("num_key_value_heads") is None:
            config["num_key_value_heads"] = heads
        if config.get("head_dim") is None and isinstance(hidden, int):
            config["head_dim"] = hidden // heads
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            config.setdefault("rope_scaling", rope)
    config.setdefault("rope_scaling", None)
    config.setdefault("tie_word_embeddings", str(config.get("model_type", "")).startswith("gemma"))
    return config


def _ids(path: Path, value: Any) -> set[int]:
    """`eos_token_id` as a set: absent, one ID or a list of them."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    for one in values:
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < _ID_LIMIT:
            raise ModelFileError(path, f"'eos_token_id' is {brief(value)}")
    return set(values)


def token_text(value: Any) -> str:
    """A token of tokenizer_config.json as text: a string, an object with `content`, or absent ("")."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _tokenizer_eos(path: Path, tokenizer_config: dict[str, Any]) -> set[int]:
    """The ID of the tokenizer's `eos_token`; empty where it names none."""
    text = token_text(tokenizer_config.get("eos_token"))
    if not text:
        return set()
    decoder = tokenizer_config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ModelFileError(
            path / "tokenizer_config.json", f"'added_tokens_decoder' is {brief(decoder)}, not an object"
        )
    for number, token in decoder.items():
        if token_text(token) == text and _ID.fullmatch(number):
            return {int(number)}
    file = path / "tokenizer.json"
    try:
        added = decode_json(file, read_whole(file, TOKENIZER_LIMIT), _TokenizerJson).added_tokens
    except FileNotFoundError:
        return set()
    return {token.id for token in added if token.content == text}


def _folder_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The chat template: chat_template.jinja first, then chat_template.json, then the tokenizer's."""
    file = path / "chat_template.jinja"
    try:
        return read_whole(file, TEMPLATE_LIMIT).decode()
    except FileNotFoundError:
        pass
    except UnicodeDecodeError as error:
        raise ModelFileError(file, f"cannot be read ({error})") from None
    own = _read_json(path / "chat_template.json") or {}
    value = own.get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(value, list):  # several named ones; "default" is the one for chat
        chat = (t for t in value if isinstance(t, dict) and t.get("name") == "default")
        value = next(chat, {}).get("template")
    return _template(path, value)


def _template(path: Path, value: Any) -> str | None:
    """A chat template that is written in another file; what is no text counts for nothing."""
    if not isinstance(value, str):
        return None
    if len(value) > TEMPLATE_LIMIT:
        raise ModelFileError(
            path, f"its chat template has {len(value)} characters, above the limit of {TEMPLATE_LIMIT}"
        )
    return value
