"""`servelite serve MODEL`: the server."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from servelite.config import SettingError, Settings, add_flags, settings_from, unknown_variables
from servelite.ipc.process import ExitCode, set_title


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=__doc__)
    text = Settings.__dataclass_fields__["model"].metadata["text"]
    parser.add_argument("model", metavar="MODEL", help=text)
    add_flags(parser)
    parser.set_defaults(run=run)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings among the parsed options; raises `SettingError`."""
    given: dict[str, Any] = {k: v for k, v in vars(options).items() if k in Settings.__dataclass_fields__}
    return settings_from(given)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    try:
        settings = settings_of(options)
    except SettingError as error:
        print(f"servelite: {error}", file=sys.stderr)
        return ExitCode.SETTING
    for name in unknown_variables():
        print(f"servelite: warning: {name} is no setting of this version and has no effect", file=sys.stderr)
    from servelite.launcher.supervisor import serve

    set_title("servelite: launcher")
    return serve(settings)
