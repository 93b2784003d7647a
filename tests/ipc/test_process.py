"""What children do first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from servelite.ipc.process import child_environment, usable_cpus


def test_child_environment_follows_the_usable_cpus_and_the_user(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
    assert child_environment()["OMP_NUM_THREADS"] == str(usable_cpus())
    assert child_environment()["GOMP_SPINCOUNT"] == "5000"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert child_environment()["OMP_NUM_THREADS"] == "7"


def test_a_title_is_what_ps_shows() -> None:
    program = (
        "from servelite.ipc.process import set_title; set_title('servelite: ' + 'x' * 500);"
        "print(open('/proc/self/cmdline').read().rstrip('\\0'));"
        "set_title('servelite: engine core'); print(open('/proc/self/cmdline').read().rstrip('\\0'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    clipped, title = done.stdout.splitlines()
    assert title == "servelite: engine core"
    assert clipped.startswith("servelite: xxx") and 20 < len(clipped) < 500


def test_a_child_dies_with_its_parent() -> None:
    child = (
        "import os, time; from servelite.ipc.process import die_with_parent; die_with_parent();"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = (
        f"import subprocess, sys, time;subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "Z":  # killed; whoever adopted it has yet to reap it
            break
        time.sleep(0.02)
    else:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the child outlived its parent")
    process.stdout.close()
