"""The platforms that are refused, and how."""

from __future__ import annotations

import pytest

import servelite
from servelite.cli import main
from servelite.platform_check import platform_refusal


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_linux_on_a_known_machine_runs(machine: str) -> None:
    assert platform_refusal("linux", machine) is None


@pytest.mark.parametrize(
    ("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "riscv64")]
)
def test_elsewhere_is_one_line_that_names_both(system: str, machine: str) -> None:
    refusal = platform_refusal(system, machine)
    assert refusal and "\n" not in refusal
    assert "Linux" in refusal and system in refusal and machine in refusal


def test_here_it_runs() -> None:
    assert platform_refusal() is None


def test_command_and_library_refuse_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert main(["--version"]) != 0
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ImportError, match="darwin"):
        servelite.LLM  # noqa: B018
