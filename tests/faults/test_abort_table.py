"""The table of aborts in `docs/faults.md`: every row of it is run by tests, here by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE, FRONT_END = "tests/engine/test_request_states.py::", "tests/frontend/test_resume.py::"
CELL = ENGINE + "test_cell"
TESTS = {
    "while its prompt is prepared": (
        "tests/frontend/test_app.py::test_a_client_that_vanishes_while_its_prompt_is_prepared",
        ENGINE + "test_an_abort_that_comes_with_its_request",
    ),
    "while it waits, for a row or for another choice's prompt": (CELL,),
    "while other choices wait for its prompt": (
        "tests/engine/test_scheduler.py::test_a_follower_goes_on_when_its_leader_is_aborted",
    ),
    "while its prompt is computed": (ENGINE + "test_an_abort_while_the_prompt_is_computed",),
    "while its answer is computed": (
        "tests/engine/test_scheduler.py::"
        "test_blocks_of_an_aborted_request_are_back_within_depth_plus_one_steps",
        "tests/frontend/test_app.py::test_a_vanished_client_is_aborted",
        "tests/http/test_disconnect.py::test_blocks_come_back",
    ),
    "while it is preempted": (
        CELL,
        ENGINE + "test_at_depth_1_nothing_is_in_flight_between_turns_so_an_end_is_at_once",
    ),
    "twice": (
        ENGINE + "test_aborting_twice_is_aborting_once",
        "tests/frontend/test_engine_client.py::test_closing_twice_aborts_once",
    ),
    "after its end": (
        CELL,
        "tests/frontend/test_engine_client.py::test_an_answer_that_has_ended_is_not_aborted",
    ),
    "when its engine has died, before its front end knows": (
        FRONT_END + "test_an_abort_that_a_dead_engine_gets",
    ),
    "while there is no engine": (
        FRONT_END + "test_an_abort_while_there_is_no_engine",
        FRONT_END + "test_an_abort_of_a_choice_while_there_is_no_engine",
        "tests/faults/test_engine_death.py::test_a_client_that_leaves_during_recovery_is_forgotten",
    ),
    "while the search for what killed the engine holds it back": (
        FRONT_END + "test_suspects_are_sent_as_they_are_named_and_told_of_when_they_pass",
    ),
    "when it has been resubmitted": (
        FRONT_END + "test_an_abort_of_what_has_been_resubmitted",
        FRONT_END + "test_an_end_in_the_middle_of_resubmitting",
    ),
    "when the new engine has died as well": (
        FRONT_END + "test_an_abort_when_the_new_engine_has_died_as_well",
    ),
    "by the death of its front end": (
        "tests/engine/test_process.py::test_a_front_end_that_is_gone_has_its_requests_aborted",
        "tests/faults/test_matrix.py::test_a_front_end_dies",
    ),
}


def rows(page: str) -> list[str]:
    """The first column of the page's table of aborts."""
    table = page.split("| a request is aborted |")[1].split("\n\n")[0]
    return re.findall(r"^\| ([^|-][^|]*?) \|", table, re.MULTILINE)


def test_every_row_is_run_by_a_test() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    assert rows(page) == list(TESTS)
    new = page.replace("| twice |", "| on a full moon | nothing |\n| twice |")
    assert set(rows(new)) - set(TESTS) == {"on a full moon"}


@pytest.mark.parametrize("test", sorted({test for tests in TESTS.values() for test in tests}))
def test_the_tests_are_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
