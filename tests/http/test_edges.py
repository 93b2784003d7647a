"""TLS that the server ends itself, over real sockets, and starts whose certificate is of no use."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from servelite.config import SettingError, Settings
from servelite.frontend.tls import tls_context
from servelite.ipc.process import ExitCode
from tests.http.server import running_server
from tests.http.test_settings import SIMULATED, failing


def certificate(folder: Path, *, password: str = "") -> tuple[Path, Path]:
    """A certificate for this machine, signed by itself, and its key."""
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    protection = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=localhost"
    name = "-addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(keyfile), "-out", str(certfile)]
    command = ["openssl", "req", *kind.split(), *name.split(), *files, *protection]
    subprocess.run(command, check=True, capture_output=True)
    return certfile, keyfile


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    yield certificate(tmp_path_factory.mktemp("tls"))


def test_tls(tmp_path: Path, files: tuple[Path, Path]) -> None:
    certfile, keyfile = files
    flags = ("--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile))
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket())  # outlives the server
        server = stack.enter_context(running_server(tmp_path, *SIMULATED, *flags))
        context = ssl.create_default_context(cafile=str(certfile))
        context.set_alpn_protocols(["h2", "http/1.1"])
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=30, context=context)
        try:
            body = {"model": "demo", "prompt": "hi", "max_tokens": 8, "stream": True}
            for _ in range(2):  # the connection is kept
                connection.request("POST", "/v1/completions", json.dumps(body))
                answer = connection.getresponse()
                assert answer.status == 200
                assert answer.read().decode().endswith("data: [DONE]\n\n")
            wrapped = connection.sock
            assert isinstance(wrapped, ssl.SSLSocket)
            assert wrapped.selected_alpn_protocol() == "http/1.1"
            assert wrapped.version() in ("TLSv1.2", "TLSv1.3")
        finally:
            connection.close()
        # One that speaks no TLS, or says nothing, harms nobody.
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"HTTP/1.1 200" not in plain.recv(1000)
        silent.connect(("127.0.0.1", server.port))
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=30, context=context)
        try:
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
        finally:
            connection.close()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0  # it waits for no handshake


def test_a_certificate_of_no_use(tmp_path: Path, files: tuple[Path, Path]) -> None:
    certfile, keyfile = files
    (text := tmp_path / "text.pem").write_text("no certificate\n")
    (other := tmp_path / "other").mkdir()
    (locked := tmp_path / "locked").mkdir()
    locked_cert, locked_key = certificate(locked, password="secret")
    for cert, key, word in (
        (tmp_path / "none.pem", keyfile, "No such file"),
        (text, keyfile, "no certificate in PEM"),
        (certfile, text, "no certificate in PEM"),
        (certfile, certificate(other)[1], "key values mismatch"),
        (certfile, None, "given with --ssl-keyfile"),
        (locked_cert, locked_key, "encrypted"),
        (tmp_path, keyfile, "Is a directory"),
    ):
        with pytest.raises(SettingError) as caught:
            tls_context(Settings(ssl_certfile=str(cert), ssl_keyfile=str(key or "")))
        line = str(caught.value)
        assert line.startswith("--ssl-certfile") and word in line and "\n" not in line, line
    code, line = failing(tmp_path, "--ssl-certfile", str(text))  # before any process is started
    assert code == ExitCode.SETTING and line.startswith(f"servelite: --ssl-certfile {text}: no certificate")
    with pytest.raises(SettingError, match="--ssl-keyfile needs --ssl-certfile"):
        Settings(ssl_keyfile=str(keyfile))
    for origin in ("https://a.example/path", "a.example", ""):
        with pytest.raises(SettingError, match="--allowed-origins"):
            Settings(allowed_origins=(origin,))
