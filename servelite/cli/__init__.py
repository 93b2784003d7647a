"""The commands, one module each. Nothing heavy is imported before the command is known."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import servelite
from servelite.ipc.process import ExitCode
from servelite.platform_check import platform_refusal


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; --help has the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.SETTING, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The `servelite` command; returns the exit code."""
    if refusal := platform_refusal():
        print(refusal, file=sys.stderr)
        return ExitCode.SETTING
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments in (["--version"], ["-V"]):  # before any command is imported
        print(f"servelite {servelite.__version__}")
        return 0
    parser = OneLineParser(
        prog="servelite", description="Serves language models with an OpenAI-compatible API."
    )
    parser.add_argument("--version", action="version", version=f"servelite {servelite.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    from servelite.cli import bench, chat, env, serve

    for module in (serve, chat, bench, env):
        module.add_command(commands)
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `servelite env | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
