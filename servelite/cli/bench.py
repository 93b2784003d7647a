"""`servelite bench`: how fast is a server, and where does a step's time go?"""

from __future__ import annotations

import argparse

from servelite.cli import bench_engine, bench_serve
from servelite.cli.bench_arguments import OneLineErrors


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser("bench", help="measure a server, or the engine's parts", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True, parser_class=OneLineErrors)
    bench_serve.add_command(kinds)
    bench_engine.add_command(kinds)
