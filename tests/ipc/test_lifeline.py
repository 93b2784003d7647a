"""The lifeline: every message of both directions, and the other end's death."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from servelite.ipc import messages as m
from servelite.ipc.lifeline import Lifeline, clip, lifeline_pair

DOWN = [
    m.Boot({"model": "demo", "served_model_name": []}, 1, 2, engine_address="ipc://x", progress_fd=4),
    m.EngineUp("ipc://y", 2),
    m.EngineDown(1, "killed", True),
    m.EngineStalled(True),
    m.Resubmit((3, 4)),
    m.Resubmit(),
    m.Passed((5,)),
    m.Resubmit((1, 2)),
    m.Quarantine(5, "it kills"),
    m.Drain(1.0, 30.0),
    m.Stop(),
]  # fmt: skip
UP = [
    m.ChildReady((("load", 1.5),)),
    m.ChildFailed("ValueError", "bad", "do this", 3, "Traceback"),
    m.Drained(2),
]


@pytest.fixture
def ends() -> tuple[Lifeline, Lifeline]:
    ours, fd = lifeline_pair()
    return ours, Lifeline.from_fd(fd)


@pytest.mark.parametrize("message", DOWN + UP)
def test_messages_arrive_whole_and_in_order(ends: tuple[Lifeline, Lifeline], message: object) -> None:
    ours, theirs = ends
    sender, receiver = (ours, theirs) if message in DOWN else (theirs, ours)
    sender.send(message)  # type: ignore[arg-type]
    sender.send(message)  # type: ignore[arg-type]
    assert receiver.recv() == message
    assert receiver.recv() == message


def test_death_is_read_as_none_and_sending_to_the_dead_is_no_error(ends: tuple[Lifeline, Lifeline]) -> None:
    ours, theirs = ends
    theirs.send(m.ChildReady())
    theirs.close()
    assert ours.other_end_gone
    assert ours.recv() == m.ChildReady(), "what it said before its death is still read"
    assert ours.recv() is None
    assert ours.send(m.Stop()) is False


def test_a_message_beyond_a_packet_is_refused_and_text_can_be_clipped(
    ends: tuple[Lifeline, Lifeline],
) -> None:
    with pytest.raises(ValueError, match="limit"):
        ends[0].send(m.ChildFailed("E", "x" * 200_000))
    text = "first line\n" + "x" * 200_000 + "last line"
    assert len(clip(text)) < 20_000 and clip(text).endswith("last line") and clip("short") == "short"


def test_a_killed_process_is_noticed_by_a_selector_at_once() -> None:
    ours, fd = lifeline_pair()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[fd])
    os.close(fd)
    assert select.select([ours], [], [], 0)[0] == [] and not ours.other_end_gone
    child.kill()
    assert select.select([ours], [], [], 5)[0] == [ours]
    assert ours.recv() is None
    child.wait()
