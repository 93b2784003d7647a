"""What a launcher undoes of the signals it inherits, and what it adds as PID 1."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, time
from servelite.launcher.signals import reclaim_signals
if {first}:
    os.getpid = lambda: 1
pid = int(os.readlink("/proc/self"))
reclaim_signals()
os.kill(pid, {number})
time.sleep(10)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_process_of_a_container_ends_before_it_serves(number: int) -> None:
    """To PID 1 the kernel delivers no signal whose action is the default one: it needs a handler."""
    codes = []
    for first in (True, False):
        program = PROGRAM.format(first=first, number=int(number))
        codes.append(subprocess.run([sys.executable, "-c", program], check=False, timeout=30).returncode)
    assert codes == [128 + number, -number]


ORPHANS = """
import ctypes, os, subprocess, sys, time
from pathlib import Path
from servelite.launcher.signals import reap_orphans

SUBREAPER = 36  # of prctl: orphans below this process come to it, as to PID 1
ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
ours = subprocess.Popen(["true"])
subprocess.run(["sh", "-c", "true & exec true"], check=True)  # its child is nobody's
deadline = time.monotonic() + 10
while Path("/proc/thread-self/children").read_text().split() != [str(ours.pid)]:
    assert time.monotonic() < deadline
    reap_orphans({ours.pid})
    time.sleep(0.01)
assert ours.wait() == 0
"""


def test_orphans_are_collected_and_our_own_children_are_not() -> None:
    subprocess.run([sys.executable, "-c", ORPHANS], check=True, timeout=30)
