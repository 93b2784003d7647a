"""When an engine counts as stalled or hung, by a clock of the test's."""

from __future__ import annotations

import pytest

from servelite.launcher.watchdog import Verdict, Watchdog


def watched(stall: float = 5.0, hang: float = 60.0) -> Watchdog:
    watchdog = Watchdog(stall, hang, interval=0.5)
    watchdog.look(0.0, progress=7, busy=True)
    return watchdog


def looks(watchdog: Watchdog, begin: float, end: float, *, progress: int = 7) -> list[Verdict]:
    count = round((end - begin) / 0.5)
    return [watchdog.look(begin + 0.5 * (i + 1), progress=progress, busy=True) for i in range(count)]


def test_work_without_progress_is_a_stall_and_then_a_hang() -> None:
    verdicts = looks(watched(), 0.0, 61.0)
    assert verdicts[:9] == [Verdict.MOVES] * 9  # up to 4.5 s
    assert verdicts[9:119] == [Verdict.STALLED] * 110
    assert verdicts[119:] == [Verdict.HUNG] * 3  # from 60 s on


def test_progress_ends_a_stall() -> None:
    watchdog = watched()
    assert looks(watchdog, 0.0, 10.0)[-1] is Verdict.STALLED
    assert watchdog.look(10.5, progress=8, busy=True) is Verdict.MOVES
    assert watchdog.silence == 0


def test_an_idle_engine_never_stalls() -> None:
    watchdog = watched()
    assert all(
        watchdog.look(float(second), progress=7, busy=False) is Verdict.MOVES for second in range(1, 1000)
    )
    # Work comes: what went before does not count.
    assert watchdog.look(999.5, progress=7, busy=True) is Verdict.MOVES
    assert watchdog.silence == pytest.approx(0.5)


def test_a_step_that_is_no_slower_than_others_were_is_no_stall() -> None:
    watchdog = watched()
    looks(watchdog, 0.0, 4.0)
    watchdog.look(4.5, progress=8, busy=True)  # a step of some 4 s: five of them are legal
    assert looks(watchdog, 4.5, 24.0, progress=8) == [Verdict.MOVES] * 39
    assert looks(watchdog, 24.0, 25.0, progress=8)[-1] is Verdict.STALLED


def test_a_watchdog_that_slept_accuses_nobody() -> None:
    watchdog = watched()
    assert watchdog.look(300.0, progress=7, busy=True) is Verdict.MOVES
    assert watchdog.silence == pytest.approx(1.0)


def test_a_new_engine_is_not_charged_with_its_forerunner() -> None:
    watchdog = watched()
    looks(watchdog, 0.0, 50.0)
    watchdog.reset()
    assert looks(watchdog, 50.0, 54.5, progress=0) == [Verdict.MOVES] * 9
