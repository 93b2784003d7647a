"""Models of the Hugging Face hub, by `huggingface_hub`: its cache, its token, its progress bars.

Names are `ORG/NAME`, or `ORG/NAME:FILE.gguf` for one GGUF file of a repository. Only what is needed is
fetched: configuration, tokenizer, chat template and safetensors; no pickled weights and no code.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Final

from servelite.loader.errors import ModelNotFound

_ID: Final = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.gguf))(?::([^:]+\.gguf))?")
_FILES: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "chat_template.json", "model.safetensors.index.json", "model*.safetensors",
    "vocab.txt", "modules.json", "1_Pooling/config.json",
)  # fmt: skip
"""What is fetched of a repository; some keep a second copy of their weights under other names."""


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub model's. A local file or folder of that name comes first."""
    return _ID.fullmatch(name) is not None


def fetch(name: str, revision: str = "") -> Path:
    """The folder, or the GGUF file, of the hub's model `name`, downloaded where the cache lacks it.

    Args:
        name: see `is_hub_id`.
        revision: a branch, tag or commit; empty: the main branch.

    Raises:
        ModelNotFound: it is not there, may not be read, or cannot be fetched; one line.
    """
    # Imported here: it takes a third of a second, and only this needs it.
    import huggingface_hub

    found = _ID.fullmatch(name)
    assert found is not None
    repo, file = found[1], found[2]
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision or None))
        folder = Path(
            huggingface_hub.snapshot_download(repo, revision=revision or None, allow_patterns=list(_FILES))
        )
    except Exception as error:  # of many kinds, its HTTP library's among them
        raise ModelNotFound(f"model {name!r}: {_reason(error, repo, file, revision)}") from None
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"model {name!r}: the repository has no config.json; for a GGUF file of it give {repo}:FILE.gguf"
        )
    return folder


def _reason(error: Exception, repo: str, file: str | None, revision: str) -> str:
    """What went wrong and what to do about it, in one line."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    caused = _causes(error)
    if isinstance(error, errors.GatedRepoError):
        return f"is gated; accept its terms at {hub}/{repo} and set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"is no file or folder here, and {hub} has no such model (or it is private, or the token is "
            "wrong: set HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {revision!r}"
    if any(isinstance(one, errors.OfflineModeIsEnabled) for one in caused):
        return "is no file or folder here, is not (or not whole) in the cache, and HF_HUB_OFFLINE is set"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"has no file {file!r}"
    full = next((one for one in caused if getattr(one, "errno", None) == errno.ENOSPC), None)
    if full is not None:
        return f"the disk of the cache {constants.HF_HUB_CACHE} is full (HF_HOME moves the cache)"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"is no file or folder here, is not in the cache, and {hub} cannot be reached "
            f"({_line(caused[-1])})"
        )
    return f"cannot be fetched from {hub} ({_line(error)})"


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, first to last."""
    chain: list[BaseException] = []
    next_one: BaseException | None = error
    while next_one is not None and next_one not in chain:
        chain.append(next_one)
        next_one = next_one.__cause__ or next_one.__context__
    return chain


def _line(error: BaseException) -> str:
    """Its kind and the first line of its text."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
