"""No silent skips: with SERVELITE_TEST_ALL=1 a skip that `allowed_skips.txt` does not list fails the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

VARIABLE = "SERVELITE_TEST_ALL"


@dataclass(frozen=True)
class AllowedSkip:
    """One line of the list: which tests, and what their reason must contain."""

    node: str
    text: str

    def covers(self, node: str, reason: str) -> bool:
        matches = node.startswith(self.node[:-1]) if self.node.endswith("*") else node == self.node
        return matches and self.text in reason


def read_allowed(path: Path) -> tuple[AllowedSkip, ...]:
    """The lines of the list at `path`; raises ValueError for a line that is not `NODE | TEXT`."""
    allowed = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        node, bar, text = (part.strip() for part in line.partition(" | "))
        if not (node and bar and text):
            raise ValueError(f"{path}:{number}: not of the form NODE | TEXT: {line!r}")
        allowed.append(AllowedSkip(node, text))
    return tuple(allowed)


class SkipPolice:
    """Notes every skip of a run, of tests and of whole files, and fails the run over the unlisted."""

    def __init__(self, allowed: tuple[AllowedSkip, ...]) -> None:
        self.allowed = allowed
        self.unlisted: list[tuple[str, str]] = []

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(skip.covers(report.nodeid, reason) for skip in self.allowed):
            self.unlisted.append((report.nodeid, reason))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unlisted:
            terminalreporter.section(f"skips that {VARIABLE}=1 does not allow", red=True)
            for node, reason in self.unlisted:
                terminalreporter.line(f"{node}: {reason}")
