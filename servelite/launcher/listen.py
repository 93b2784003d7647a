"""The listening socket, opened once by the launcher and inherited by every front end."""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import Final

from servelite.config import SettingError, Settings
from servelite.frontend.tls import tls_context
from servelite.ipc.process import ExitCode
from servelite.launcher.errors import LaunchError

BACKLOG: Final = 2048


def raise_descriptor_limit() -> None:
    """Let this process and its children have as many open connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_listener(host: str, port: int) -> socket.socket:
    """A listening TCP socket on `host` (a name, IPv4 or IPv6 address) and `port` (0: a free one).

    Raises:
        LaunchError: the address is unknown, in use or not allowed.
    """
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        reason = error.strerror or str(error)
        raise LaunchError(
            f"cannot listen on {host}:{port}: {reason}; choose another --port or --host", ExitCode.SETTING
        ) from None
    sock.setblocking(False)
    return sock


def check_certificate(settings: Settings) -> None:
    """Raises `LaunchError` where the front ends could not use the files of `--ssl-certfile`."""
    try:
        tls_context(settings)
    except SettingError as error:
        raise LaunchError(str(error), ExitCode.SETTING) from None


def url_of(sock: socket.socket, *, tls: bool) -> str:
    """The address to give a client on this machine."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
