"""Which build of the native kernels runs here: one an instruction set, the best that the CPU has."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from servelite.config import SettingError

VARIABLE: Final = "SERVELITE_ISA"
PLAIN_TORCH: Final = "torch"  # no native kernels

# Best first, with what each needs by the names that /proc/cpuinfo gives; csrc/cpu has a file for each.
NEEDS: Final = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}),
    "avx2": frozenset({"avx2", "fma"}),
    "baseline": frozenset[str](),
}


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the CPU can and the operating system lets it; empty where it is called otherwise (ARM)."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def library_path(name: str, folder: Path = Path(__file__).parent) -> Path | None:
    """The shared library of that name: an instruction set's, or "collective"; None if there is none."""
    paths = (folder / f"_{name}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def usable(flags: frozenset[str]) -> tuple[str, ...]:
    """The instruction sets that are built and that the CPU has, best first."""
    return tuple(isa for isa, needs in NEEDS.items() if needs <= flags and library_path(isa))


def choose_isa(environ: Mapping[str, str], flags: frozenset[str]) -> tuple[str, str]:
    """The instruction set to use (or `PLAIN_TORCH`), and why that one.

    Raises:
        SettingError: the environment asks for one that is unknown, not of this CPU, or not built.
    """
    found = usable(flags)
    asked = environ.get(VARIABLE, "")
    if not asked:
        if found:
            return found[0], "the best that this CPU has and that was built"
        return PLAIN_TORCH, "none was built: no C++ compiler at install"
    known = (*NEEDS, PLAIN_TORCH)
    if asked not in known:
        raise SettingError(f"{VARIABLE} is {asked!r}; it must be one of {', '.join(known)}")
    if asked != PLAIN_TORCH and asked not in found:
        lacking = ", ".join(sorted(NEEDS[asked] - flags))
        cause = f"this CPU has no {lacking}" if lacking else "it was not built (it needs a C++ compiler)"
        can_be = ", ".join((*found, PLAIN_TORCH))
        raise SettingError(f"{VARIABLE} is {asked!r}, but {cause}; here it can be one of {can_be}")
    return asked, f"{VARIABLE} says so"
