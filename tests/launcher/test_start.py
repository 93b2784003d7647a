"""What a start needs: a listening socket, a private folder, a model, signals on a socket."""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
from pathlib import Path

import pytest

from servelite.config import Settings
from servelite.ipc.process import ExitCode
from servelite.launcher.errors import LaunchError
from servelite.launcher.listen import open_listener, url_of
from servelite.launcher.runtime_dir import runtime_folder
from servelite.launcher.signals import SignalPipe
from servelite.launcher.start import find_model


def test_a_free_port_is_found_and_told() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0 and url_of(listener) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()


def test_ipv6() -> None:
    try:
        listener = open_listener("::1", 0)
    except LaunchError as error:
        assert "::1" in str(error)  # a machine without it says so in the same one line
        return
    with listener:
        assert url_of(listener).startswith("http://[::1]:")


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


def test_the_folder_is_private_and_goes(tmp_path: Path) -> None:
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
