"""Which native kernels are taken, and what is said where they cannot be."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from servelite.config import SettingError
from servelite.kernels import dispatch, reference
from servelite.kernels.cpu import isa, native
from servelite.kernels.cpu.isa import NEEDS, choose_isa, cpu_flags, usable

ALL = frozenset[str]().union(*NEEDS.values())


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The instruction sets that are taken for built; all to begin with."""
    names = set(NEEDS)
    monkeypatch.setattr(isa, "library_path", lambda name: Path(name) if name in names else None)
    return names


def test_the_best_of_what_is_built_and_there(built: set[str]) -> None:
    assert choose_isa({}, ALL)[0] == "avx512"
    assert choose_isa({}, ALL - {"avx512vl"})[0] == "avx2"
    assert choose_isa({}, frozenset())[0] == "baseline"
    built.remove("avx512")
    assert choose_isa({}, ALL)[0] == "avx2"
    built.clear()
    assert choose_isa({}, ALL) == ("torch", "none was built: no C++ compiler at install")


def test_the_environment_decides(built: set[str]) -> None:
    for name in (*NEEDS, "torch"):
        assert choose_isa({"SERVELITE_ISA": name}, ALL) == (name, "SERVELITE_ISA says so")


@pytest.mark.parametrize(
    ("asked", "flags", "text"),
    [
        ("sse9", ALL, "SERVELITE_ISA is 'sse9'; it must be one of avx512, avx2, baseline, torch"),
        (
            "avx512",
            ALL - {"avx512vl", "avx512bw"},
            "SERVELITE_ISA is 'avx512', but this CPU has no avx512bw, avx512vl; "
            "here it can be one of avx2, torch",
        ),
        (
            "baseline",
            ALL,
            "SERVELITE_ISA is 'baseline', but it was not built (it needs a C++ compiler); "
            "here it can be one of avx512, avx2, torch",
        ),
    ],
)
def test_what_cannot_be_had_is_one_line(
    built: set[str], asked: str, flags: frozenset[str], text: str
) -> None:
    built.remove("baseline")
    with pytest.raises(SettingError) as caught:
        choose_isa({"SERVELITE_ISA": asked}, flags)
    assert str(caught.value) == text


def test_flags_of_a_cpu(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nvmx flags\t: vnmi\nflags\t\t: fpu avx2 fma\n\nflags\t\t: other\n")
    assert cpu_flags(info) == {"fpu", "avx2", "fma"}
    info.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_flags(info) == frozenset()
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_without_native_kernels_the_log_says_what_is_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isa, "library_path", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert dispatch.choose_kernels("cpu", {}) is dispatch.REFERENCE
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no native attention (none was built: no C++ compiler at install)" in record.message
    assert "attention takes 2 to 5 times longer" in record.message


def test_a_library_that_cannot_be_loaded_is_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "_baseline.so"
    broken.write_bytes(b"not a library")
    for module in (isa, native):
        monkeypatch.setattr(module, "library_path", lambda name: broken)
    assert dispatch.choose_kernels("cpu", {}) is dispatch.REFERENCE
    assert str(broken) in caplog.text


def test_the_log_names_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    found = usable(cpu_flags())
    if not found:
        pytest.skip("the native kernels are not built")
    with caplog.at_level(logging.INFO):
        kernels = dispatch.choose_kernels("cpu", {})
    assert kernels.name == f"native {found[0]}" and found[0] in caplog.text
    assert kernels.paged_attention is not reference.paged_attention
    assert kernels.rope is reference.rope


def test_torch_and_the_kernels_share_one_openmp() -> None:
    """Two runtimes would have two teams of threads, which take the cores from each other."""
    found = usable(cpu_flags())
    if not found:
        pytest.skip("the native kernels are not built")
    native.NativeKernels(found[0])
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    runtimes = {name for name in maps if "gomp" in name or "iomp" in name}
    assert len(runtimes) == 1 and str(Path(torch.__file__).parent) in runtimes.pop()
