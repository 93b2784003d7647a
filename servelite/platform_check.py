"""Whether servelite runs here at all, told before anything fails in a way nobody can read."""

from __future__ import annotations

import platform
import sys

MACHINES = ("x86_64", "aarch64")


def platform_refusal(system: str = "", machine: str = "") -> str | None:
    """One line saying why servelite does not run on this platform, or None where it does.

    Args:
        system, machine: as `sys.platform` and `platform.machine()` give them; not given: this one's.
    """
    system = system or sys.platform
    machine = machine or platform.machine()
    if system == "linux" and machine in MACHINES:
        return None
    known = " or ".join(MACHINES)
    return f"servelite runs on Linux on {known}; this is {system} on {machine or 'an unknown machine'}"
