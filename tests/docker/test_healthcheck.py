"""The image's health check against a server that is there, that drains, and that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.docker.nginx import free_port
from tests.http.server import running_server
from tests.http.test_edges import certificate
from tests.sources import ROOT


def health(port: int, **settings: str) -> tuple[int, str]:
    """Exit code and output."""
    done = subprocess.run(
        [sys.executable, ROOT / "docker" / "healthcheck.py"],
        env={**os.environ, "SERVELITE_PORT": str(port), **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_ready_draining_and_gone(tmp_path: Path, demo_model: Path) -> None:
    flags = ("--executor", "simulated", "--api-key", "secret", "--drain-delay", "60")
    with running_server(tmp_path, *flags) as server:
        assert health(server.port) == (0, '200 {"status":"ready"}\n')  # without a key
        server.signal(signal.SIGTERM)
        while health(server.port)[0] == 0:  # until the front end has heard of it
            pass
        assert health(server.port) == (1, '503 {"status":"draining"}\n')
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    code, said = health(free_port())
    assert code == 1 and said.startswith("no answer: ConnectionRefusedError")


def test_tls(tmp_path: Path, demo_model: Path) -> None:
    certfile, keyfile = map(str, certificate(tmp_path))
    flags = ("--executor", "simulated", "--ssl-certfile", certfile, "--ssl-keyfile", keyfile)
    with running_server(tmp_path, *flags) as server:
        asked = health(server.port, SERVELITE_SSL_CERTFILE=certfile)
        assert asked == (0, '200 {"status":"ready"}\n')
