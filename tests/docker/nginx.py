"""Debian's nginx as a test's balancer: `docker/nginx.conf` with ports and paths of this machine."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.sources import ROOT

CONF: Final = ROOT / "docker" / "nginx.conf"
UPSTREAM: Final = re.compile(r"(?<=server )replica-(\d):8000(?= )")
START_S: Final = 10.0
LOG_S: Final = 5.0


def free_port() -> int:
    """A TCP port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def nginx_binary() -> str:
    """Debian's nginx, or the test is skipped."""
    found = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if found is None:
        pytest.skip("nginx is not installed")
    return found


def configured(folder: Path, port: int, replicas: Sequence[int]) -> str:
    """The configuration with everything that ties it to a container put in this machine's terms."""
    text = CONF.read_text()
    assert sorted(UPSTREAM.findall(text)) == ["1", "1", "2", "2"]
    text = UPSTREAM.sub(lambda found: f"127.0.0.1:{replicas[int(found[1]) - 1]}", text)
    for ours, theirs in (
        ("/tmp/nginx", f"{folder}/nginx"),
        ("listen 8080;", f"listen 127.0.0.1:{port};"),
        ("/dev/stdout", f"{folder}/access.log"),
    ):
        assert ours in text
        text = text.replace(ours, theirs)
    return text


@dataclass(frozen=True)
class Nginx:
    """A running nginx."""

    port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def access_log(self) -> str:
        """What it has logged of requests that are over."""
        return (self.folder / "access.log").read_text()

    def wait_logged(self, text: str, times: int = 1) -> None:
        """Until `text` is in the access log: a line is written a moment after its request is over."""
        deadline = time.monotonic() + LOG_S
        while self.access_log().count(text) < times:
            assert time.monotonic() < deadline, self.access_log()[-2000:]
            time.sleep(0.02)

    def errors(self) -> str:
        """Its error log so far."""
        return (self.folder / "error.log").read_text()


@contextmanager
def running_nginx(replicas: Sequence[int]) -> Iterator[Nginx]:
    """nginx as a normal user, before the replicas on these ports."""
    binary = nginx_binary()
    # Not in the run's temporary folder: a normal user cannot go there where root runs the tests.
    folder = Path(tempfile.mkdtemp(prefix="slt-nginx-", dir="/tmp"))
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": ()}
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    nginx = Nginx(free_port(), folder)
    (folder / "nginx.conf").write_text(configured(folder, nginx.port, replicas))
    (folder / "nginx.conf").chmod(0o644)
    try:
        with (folder / "error.log").open("w") as errors:
            process = subprocess.Popen(
                [binary, "-e", "stderr", "-c", str(folder / "nginx.conf"), "-g", "daemon off;"],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd="/",
                **user,
            )
        try:
            _wait_listening(nginx, process)
            yield nginx
        finally:
            process.terminate()
            process.wait(10)
    finally:
        shutil.rmtree(folder)


def _wait_listening(nginx: Nginx, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", nginx.port)) == 0:
                return
        assert process.poll() is None and time.monotonic() < deadline, nginx.errors()
        time.sleep(0.02)
