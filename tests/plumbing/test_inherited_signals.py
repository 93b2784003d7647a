"""The tests run in the background of a shell, too."""

from __future__ import annotations

import subprocess
import sys

from tests.sources import ROOT

PROGRAM = """
import os, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if sys.argv[1] == "reset":
    from tests import inherited_signals
    inherited_signals.reset()
sys.exit(subprocess.run(["/bin/sh", "-c", "kill -INT $$; kill -TERM $$; exit 7"]).returncode % 256)
"""


def run(word: str) -> int:
    command = [sys.executable, "-c", PROGRAM, word]
    return subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode


def test_children_are_ended_by_signals_that_were_ignored_or_blocked() -> None:
    assert run("leave") == 7  # what the reset is for
    assert run("reset") != 7
