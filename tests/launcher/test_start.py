"""What a start needs: a listening socket, a private folder, a model, signals on a socket."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path

import pytest

from servelite.config import Settings
from servelite.ipc.messages import Boot
from servelite.ipc.process import ExitCode
from servelite.launcher import supervisor
from servelite.launcher.child import Child
from servelite.launcher.engine_life import EngineLife
from servelite.launcher.errors import LaunchError
from servelite.launcher.listen import open_listener, url_of
from servelite.launcher.runtime_dir import runtime_folder
from servelite.launcher.signals import ENDING, SignalPipe, ending_at_once
from servelite.launcher.start import check_model, find_model


def test_a_free_port_is_found_and_told() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0 and url_of(listener, tls=False) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()


def test_ipv6() -> None:
    try:
        listener = open_listener("::1", 0)
    except LaunchError as error:
        assert "::1" in str(error)  # a machine without it says so in the same one line
        return
    with listener:
        assert url_of(listener, tls=False).startswith("http://[::1]:")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(LaunchError, match=host) as caught:
        open_listener(host, 0)
    assert caught.value.exit_code is ExitCode.SETTING


def test_a_port_in_use_is_refused() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(LaunchError, match=f"{port}.*in use"):
            open_listener("127.0.0.1", port)


def test_a_private_folder(tmp_path: Path) -> None:
    parent = tmp_path / "a" / "b"
    with runtime_folder(str(parent)) as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert Path(folder).parent == parent
        (Path(folder) / "engine-0-0.sock").touch()
        with runtime_folder(str(parent)) as other:
            assert other != folder
        assert os.path.isdir(folder)
    assert not parent.exists()


def test_a_parent_that_was_there_stays(tmp_path: Path) -> None:
    with runtime_folder(str(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_launcher_left_is_removed(tmp_path: Path) -> None:
    with runtime_folder(str(tmp_path)) as alive:
        left = Path(shutil.copytree(alive, tmp_path / "servelite-left"))  # its lock is held by nobody
        foreign = tmp_path / "servelite-foreign"
        foreign.mkdir()
        with runtime_folder(str(tmp_path)) as second:
            assert sorted(tmp_path.iterdir()) == sorted(map(Path, (alive, foreign, second)))
        assert not left.exists() and os.path.isdir(alive)
    assert list(tmp_path.iterdir()) == [foreign]


def test_parents_that_were_made_go_even_when_the_start_fails(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="100 bytes"), runtime_folder(str(tmp_path / "a" / ("x" * 99))):
        pass
    assert list(tmp_path.iterdir()) == []
    with tempfile.TemporaryDirectory() as short:
        with pytest.raises(ZeroDivisionError), runtime_folder(f"{short}/a/b/c"):
            Path(short, "a", "kept").touch()
            raise ZeroDivisionError
        assert [entry.name for entry in Path(short, "a").iterdir()] == ["kept"]


def test_a_damaged_model_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF and then nonsense")
    with pytest.raises(LaunchError, match=r"bad\.gguf") as caught:
        check_model(Settings(model=str(tmp_path / "bad.gguf")))
    assert caught.value.exit_code is ExitCode.MODEL


@pytest.mark.parametrize("inner", ["text_config", ""])
def test_a_model_of_an_unknown_architecture_is_told_before_anything_starts(
    inner: str, tmp_path: Path
) -> None:
    sizes = {"max_position_embeddings": 64}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], **({inner: sizes} if inner else sizes)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        LaunchError, match="'Gemma3ForConditionalGeneration'; supported: BertModel, Gemma3ForCausalLM, L"
    ):
        check_model(Settings(model=str(tmp_path)))
    check_model(Settings(model=str(tmp_path), executor="simulated"))  # runs none


def test_a_child_that_fails_at_the_start_does_not_wait_for_the_other(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def child(do: str) -> Child:
        boot = Boot({"do": do}, index=0, epoch=0, engine_address="", progress_fd=-1)
        return Child.start(do, "tests.launcher.child_program", boot, ())

    boot = Boot({}, index=0, epoch=0, engine_address="", progress_fd=-1)
    monkeypatch.setattr(supervisor.EngineLife, "start", lambda *_: EngineLife(boot, (child("load"),)))
    monkeypatch.setattr(supervisor, "start_front_end", lambda *_: child("fail"))
    started = time.monotonic()
    with SignalPipe() as signals, open_listener("127.0.0.1", 0) as listener:
        assert supervisor.Supervisor(Settings(), signals, listener, started).run("unused") == 3
    assert time.monotonic() - started < 4  # less than what Stop gives a child to end
    assert capfd.readouterr().err == "servelite: it broke (mend it)\n"


def test_the_folder_goes_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), runtime_folder(str(tmp_path)):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for parent in (tmp_path / "file", tmp_path / ("x" * 120)):
        with pytest.raises(LaunchError, match="runtime-dir") as caught, runtime_folder(str(parent)):
            pass
        assert caught.value.exit_code is ExitCode.SETTING
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_model_keeps_the_name_it_was_called_by(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    found = find_model(Settings(model=str(model)))
    assert (found.model, found.served_model_name) == (str(model), (str(model),))
    assert find_model(Settings(model=str(model), served_model_name=("a", "b"))).served_model_name == (
        "a",
        "b",
    )
    with pytest.raises(LaunchError, match="none") as caught:
        find_model(Settings(model=str(tmp_path / "none")))
    assert caught.value.exit_code is ExitCode.MODEL


def test_a_model_of_a_name_too_long_for_the_system() -> None:
    with pytest.raises(LaunchError, match="cannot be looked up") as caught:
        find_model(Settings(model="x" * 5000))
    assert caught.value.exit_code is ExitCode.MODEL and "\n" not in str(caught.value)


def test_signals_arrive_as_bytes() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SignalPipe() as signals:
        assert signals.read() == []
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert select.select([signals], [], [], 5)[0]
        assert sorted(signals.read()) == [signal.SIGINT, signal.SIGTERM]
        assert signals.read() == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_hangup_stays_ignored() -> None:
    """As `nohup` leaves it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalPipe() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.read() == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_that_end_at_once_do_so_for_a_while_only() -> None:
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` leaves it
    try:
        before = {number: signal.getsignal(number) for number in ENDING}
        with ending_at_once():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGINT) is not before[signal.SIGINT]
        assert {number: signal.getsignal(number) for number in ENDING} == before
    finally:
        signal.signal(signal.SIGHUP, hangup)


def test_a_revision_is_for_the_hub_only(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    for model in (str(tmp_path / "m.gguf"), "demo", "no-such-thing"):
        with pytest.raises(LaunchError, match="--revision is 'v1'") as caught:
            find_model(Settings(model=model, revision="v1"))
        assert caught.value.exit_code is ExitCode.SETTING and "\n" not in str(caught.value)
