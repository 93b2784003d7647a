"""Models by hub id, against a local stand-in for the hub: what is fetched, cached, refused; Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from servelite.loader.hub import is_hub_id
from servelite.loader.resolve import is_local
from tests.http.server import end, running_server, start_server
from tests.loader.hub_server import COMMIT, OLDER, Hub, running_hub
from tests.tiny_models import tiny_llama
from tests.tokenizer.small_folder import sentencepiece

FETCH = """
import sys
from servelite.loader.resolve import ModelNotFound, resolve_model
for name in sys.argv[1:]:
    try:
        print(resolve_model(*name.split("@")))
    except ModelNotFound as error:
        print(f"refused: {error}")
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        hub.files["org/small"] = {
            "config.json": b"{}",
            "model.safetensors": b"S" * 3000,
            "tokenizer.json": b"[]",
            "README.md": b"read me",
            "pytorch_model.bin": b"pickle",
            "modeling_own.py": b"code",
            "original/consolidated.safetensors": b"S",
        }
        encoder = ("config.json", "model.safetensors", "vocab.txt", "modules.json", "1_Pooling/config.json")
        hub.files["org/encoder"] = dict.fromkeys(
            (*encoder, "onnx/model.onnx", "2_Dense/model.safetensors"), b"{}"
        )
        hub.files["org/quantised"] = {"a.gguf": b"GGUF a", "b.gguf": b"GGUF b"}
        yield hub


def fetch(*names: str) -> list[str]:
    """The path or the refusal of each NAME or NAME@REVISION, one line each.

    In a process of its own: `huggingface_hub` reads its variables when it is imported.
    """
    done = subprocess.run(
        [sys.executable, "-c", FETCH, *names], capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == len(names), done.stderr
    return lines


def path_of(name: str) -> Path:
    (line,) = fetch(name)
    assert not line.startswith("refused"), line
    return Path(line)


def refusal(name: str) -> str:
    (line,) = fetch(name)
    assert line.startswith("refused: ")
    return line.removeprefix("refused: ")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", True),
        ("Org-1/Name.v2_x", True),
        ("org/name:model-Q4_K_M.gguf", True),
        ("org/name:sub/model.gguf", True),
        ("org/name:tag", False),
        ("org/model.gguf", False),
        ("name", False),
        ("demo", False),
        ("./org/name", False),
        ("/org/name", False),
        ("org/name/more", False),
        ("~/name", False),
    ],
)
def test_what_a_hub_id_looks_like(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected


def test_a_local_folder_of_the_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_local("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert is_local("org/name")


def test_only_what_is_needed_is_fetched_and_only_once(hub: Hub) -> None:
    first, second = fetch("org/small", "org/small")
    folder = Path(first)
    assert second == first and folder.name == COMMIT
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (folder / "model.safetensors").read_bytes() == b"S" * 3000
    assert sorted(hub.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_what_says_how_an_encoder_pools_is_fetched(hub: Hub) -> None:
    (path,) = fetch("org/encoder")
    names = {str(file.relative_to(path)) for file in Path(path).rglob("*") if file.is_file()}
    assert names == {"config.json", "model.safetensors", "vocab.txt", "modules.json", "1_Pooling/config.json"}


def test_one_gguf_file_of_a_repository(hub: Hub) -> None:
    path, absent, whole = fetch("org/quantised:b.gguf", "org/quantised:c.gguf", "org/quantised")
    assert Path(path).read_bytes() == b"GGUF b" and hub.fetched == ["b.gguf"]
    assert absent == "refused: model 'org/quantised:c.gguf': has no file 'c.gguf'"
    assert whole.endswith(
        "the repository has no config.json; for a GGUF file of it give org/quantised:FILE.gguf"
    )


def test_a_revision(hub: Hub) -> None:
    tag, commit, none = fetch("org/small@v1", f"org/small@{COMMIT}", "org/small@v9")
    assert (Path(tag).name, Path(commit).name) == (OLDER, COMMIT)
    assert none == "refused: model 'org/small': has no revision 'v9'"


def test_a_model_that_is_not_there(hub: Hub) -> None:
    assert refusal("org/none") == (
        f"model 'org/none': is no file or folder here, and {hub.url} has no such model (or it is private, or "
        "the token is wrong: set HF_TOKEN)"
    )


def test_a_gated_model_needs_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated["org/small"] = "hf_right"
    text = f"is gated; accept its terms at {hub.url}/org/small and set HF_TOKEN"
    assert text in refusal("org/small")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert text in refusal("org/small")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert path_of("org/small").is_dir()


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refusal("org/small").endswith(
        "is no file or folder here, is not (or not whole) in the cache, and HF_HUB_OFFLINE is set"
    )
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = path_of("org/small")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert path_of("org/small") == folder


def test_a_hub_that_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = path_of("org/small")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert path_of("org/small") == folder  # what is whole in the cache needs no hub
    assert "is not in the cache, and http://127.0.0.1:9 cannot be reached (" in refusal("org/other")


def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    code = (
        "import errno, sys, huggingface_hub\n"
        "from servelite.loader import hub\n"
        "def full(*_, **__): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "huggingface_hub.snapshot_download = full\n"
        "hub.fetch('org/name')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "model 'org/name': the disk of the cache" in done.stderr.splitlines()[-1]
    assert "is full (HF_HOME moves the cache)" in done.stderr.splitlines()[-1]


def test_finding_a_local_model_imports_no_hub(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    code = "import sys; from servelite.launcher import supervisor; from servelite.loader.resolve import *; "
    code += f"resolve_model({str(tmp_path / 'm.gguf')!r}); print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_a_server_by_hub_id(hub: Hub, tmp_path: Path) -> None:
    backend = sentencepiece()
    folder = tmp_path / "model"
    tiny_llama(folder, vocab_size=backend.get_vocab_size())
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    hub.add_folder("org/tiny", folder)
    memory = ("--kv-cache-memory-bytes", str(8 << 20))
    with running_server(tmp_path, "--revision", "v1", *memory, model="org/tiny") as server:
        status, answer = server.post(
            "/v1/completions", {"model": "org/tiny", "prompt": "hi", "max_tokens": 4}
        )
        assert status == 200 and answer["model"] == "org/tiny" and answer["usage"]["completion_tokens"] >= 1
        assert json.loads(server.get("/v1/models")[1])["data"][0]["id"] == "org/tiny"
    assert not any(path.endswith((".bin", ".py", "inductor")) for path in hub.fetched)


def test_a_server_that_is_not_to_be(hub: Hub, tmp_path: Path, demo_model: Path) -> None:
    server = start_server(tmp_path, "--revision", "v1", model=str(demo_model))
    try:
        assert server.wait() == 2
        assert server.errors() == (
            f"servelite: --revision is 'v1', which only a model of the hub has: {str(demo_model)!r} is none\n"
        )
    finally:
        end(server)
    server = start_server(tmp_path, model="org/none")
    try:
        assert server.wait() == 3
        assert server.errors().startswith("servelite: model 'org/none': is no file or folder here")
        assert server.errors().count("\n") == 1
    finally:
        end(server)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_download_at_once_and_the_next_start_goes_on(
    hub: Hub, tmp_path: Path, number: int
) -> None:
    hub.files["org/small"]["model.safetensors"] = os.urandom(4 << 20)
    hub.seconds_a_block = 0.2  # 13 s in all
    server = start_server(tmp_path, model="org/small")
    try:
        deadline = time.monotonic() + 30
        while "model.safetensors" not in hub.fetched:
            assert time.monotonic() < deadline and server.process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        started = time.monotonic()
        server.signal(number)
        assert server.wait() == 128 + number
        assert time.monotonic() - started < 5
        assert server.errors().endswith("servelite: interrupted; what has been downloaded is kept\n")
    finally:
        end(server)
    hub.seconds_a_block = 0.0
    folder = path_of("org/small")
    assert (folder / "model.safetensors").read_bytes() == hub.files["org/small"]["model.safetensors"]
