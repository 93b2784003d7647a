"""The progress page: what a reader learns of an engine's steps."""

from __future__ import annotations

import os

import pytest

from servelite.ipc.progress import MAX_FRONT_ENDS, MAX_IN_FLIGHT, ProgressPage


def test_steps_started_and_not_completed_are_seen_by_another_view() -> None:
    page = ProgressPage.create()
    other = ProgressPage.attach(os.dup(page.fd))
    page.begin_epoch(4)
    assert other.steps_in_flight() == []
    page.start_step(1, [0, 2], [10, 11])
    page.start_step(2, [0], [10])
    assert [(s.epoch, s.step, s.requests) for s in other.steps_in_flight()] == [
        (4, 1, ((0, 10), (2, 11))),
        (4, 2, ((0, 10),)),
    ]
    page.complete_step(1)
    assert [s.step for s in other.steps_in_flight()] == [2]
    page.begin_epoch(5)
    assert other.steps_in_flight() == []


def test_the_ring_holds_the_deepest_pipeline() -> None:
    page = ProgressPage.create()
    page.begin_epoch(1)
    for step in range(1, 100):
        page.start_step(step, [0], [step])
        if step > MAX_IN_FLIGHT:
            page.complete_step(step - MAX_IN_FLIGHT)
    assert [s.step for s in page.steps_in_flight()] == list(range(100 - MAX_IN_FLIGHT, 100))


def test_progress_grows_with_every_start_and_completion() -> None:
    page = ProgressPage.create()
    page.begin_epoch(1)
    seen = [page.progress]
    page.start_step(1, [], [])
    seen.append(page.progress)
    page.complete_step(1)
    seen.append(page.progress)
    assert seen == sorted(set(seen))


def test_a_writer_that_died_half_way_does_not_hang_the_reader() -> None:
    page = ProgressPage.create()
    page.begin_epoch(1)
    page.start_step(1, [0], [3])
    page._words[0] += 1  # odd: a write never finished
    assert [s.requests for s in page.steps_in_flight()] == [((0, 3),)]


def test_slots_are_shared_and_another_descriptor_is_refused() -> None:
    page = ProgressPage.create()
    other = ProgressPage.attach(page.fd)
    page.slots[1, MAX_FRONT_ENDS - 1] = 5
    assert other.slots.sum() == 5
    with pytest.raises(ValueError, match="no progress page"):
        ProgressPage.attach(os.memfd_create("other"))
