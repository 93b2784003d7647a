"""From a model's name to its place: what is found, and one line on what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from servelite.loader import demo
from servelite.loader.resolve import ModelNotFound, cache_folder, resolve_model


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == file


def test_a_folder_with_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model("~/m.gguf") == tmp_path / "m.gguf"


def test_a_folder_without_a_configuration_names_the_file_beside(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"holds no config\.json; did you mean .*m\.gguf\?"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["", "nothing", "org/name", "demo2"])
def test_what_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 5000, "./" + "x" * 300, "~no-such-user/m.gguf"])
def test_what_cannot_be_looked_up(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"^model '[^\n]* cannot be looked up \([^\n]+\)$") as caught:
        resolve_model(name)
    assert len(str(caught.value)) < 400


def test_demo_is_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "demo_model_path", lambda: tmp_path / "demo.gguf")
    assert resolve_model("demo") == tmp_path / "demo.gguf"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home-of-a-test")
    assert cache_folder({}) == Path("/home-of-a-test/.cache/servelite")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/servelite")
    assert cache_folder({"XDG_CACHE_HOME": "/x", "SERVELITE_CACHE": "/own"}) == Path("/own")


def test_without_a_home_folder_the_variable_to_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ModelNotFound, match="set SERVELITE_CACHE"):
        cache_folder({})


def test_resolving_needs_no_torch() -> None:
    code = "import servelite.loader.demo, sys; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
