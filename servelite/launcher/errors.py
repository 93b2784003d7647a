"""What keeps a server from starting."""

from __future__ import annotations

from servelite.ipc.process import ExitCode


class LaunchError(Exception):
    """A start that cannot succeed, in one readable line."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code
