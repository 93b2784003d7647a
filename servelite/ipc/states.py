"""The life of a request: every state against every event.

`TABLE[state][event]` says which state follows and what happens; most cells say that nothing does.
A test puts a request into each state, lets each event happen and compares. `docs/request-states.md`
is made from this table.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class State(enum.StrEnum):
    """Where a request is. The front end owns `lost`; the engine owns all others."""

    REFUSED = "refused"  # the engine said no at its Add
    WAITING = "waiting"  # in the queue, no row, no blocks
    PARKED = "parked"  # waits for something else than a row: WAITING_ON(x)
    RUNNING = "running"  # has a row
    PREEMPTED = "preempted"  # lost its blocks; queued again once none of its steps is in flight
    FINISHING = "finishing"  # ended for the client; row and blocks held by steps still in flight
    FINISHED = "finished"  # forgotten by the engine
    LOST = "lost"  # its engine died; the front end keeps what is needed to resume it


class Event(enum.StrEnum):
    """What can happen to a request."""

    ADD = "add"  # an Add with its number arrives
    REFUSE = "refuse"  # an Add with its number arrives that the engine cannot serve
    ABORT = "abort"
    FINISH = "finish"  # a step's result brings its last token
    PREEMPT = "preempt"  # the pool is out of blocks and it is the victim
    ENGINE_DEATH = "engine death"
    RESUME = "resume"  # an Add with its number, what it has produced and a higher attempt arrives
    DEADLINE = "deadline"  # its deadline passes
    SHUTDOWN = "shutdown"  # the engine is told to stop


class Cell(NamedTuple):
    """What an event does to a request in a state."""

    next: State
    effect: str  # "": nothing at all happens


_LOST: Final = Cell(
    State.LOST, "the front end keeps prompt, tokens and seed; the stream stays open or gets an error"
)
_AS_NEW: Final = Cell(State.WAITING, "a new request: ended ones are forgotten, and numbers are not reused")
_AS_NEW_REFUSED: Final = Cell(State.REFUSED, "an error of its own")
_ENDED_NOW: Final = "row and blocks are free at once"


def _row(state: State, **cells: Cell) -> dict[Event, Cell]:
    nothing = Cell(state, "")
    return {event: cells.get(event.name.lower(), nothing) for event in Event}


TABLE: Final[dict[State, dict[Event, Cell]]] = {
    State.REFUSED: _row(State.REFUSED, add=_AS_NEW, refuse=_AS_NEW_REFUSED, resume=_AS_NEW),
    State.WAITING: _row(
        State.WAITING,
        abort=Cell(State.FINISHED, "leaves the queue"),
        engine_death=_LOST,
        deadline=Cell(State.FINISHED, "error 503, deadline_exceeded"),
        shutdown=Cell(State.FINISHED, "error 503, server_shutting_down"),
    ),
    State.PARKED: _row(
        State.PARKED,
        abort=Cell(State.FINISHED, "leaves the parking place"),
        engine_death=_LOST,
        deadline=Cell(State.FINISHED, "error 503, deadline_exceeded"),
        shutdown=Cell(State.FINISHED, "error 503, server_shutting_down"),
    ),
    State.RUNNING: _row(
        State.RUNNING,
        abort=Cell(State.FINISHING, "its tokens are dropped; " + _ENDED_NOW + " where no step is in flight"),
        finish=Cell(State.FINISHING, "the answer is complete; " + _ENDED_NOW + " where no step is in flight"),
        preempt=Cell(State.PREEMPTED, "blocks are freed when its steps in flight have completed"),
        engine_death=_LOST,
        shutdown=Cell(State.FINISHED, "error 503, server_shutting_down"),
    ),
    State.PREEMPTED: _row(
        State.PREEMPTED,
        abort=Cell(State.FINISHING, "as in running, or leaves the queue where no step is in flight"),
        finish=Cell(State.FINISHING, "a late token is appended as usual, and was its last"),
        engine_death=_LOST,
        shutdown=Cell(State.FINISHED, "error 503, server_shutting_down"),
    ),
    State.FINISHING: _row(
        State.FINISHING,
        finish=Cell(
            State.FINISHED, "surplus tokens are dropped; with the last step in flight row and blocks are free"
        ),
        engine_death=Cell(State.FINISHED, "the client has its answer"),
        shutdown=Cell(State.FINISHED, ""),
    ),
    State.FINISHED: _row(State.FINISHED, add=_AS_NEW, refuse=_AS_NEW_REFUSED, resume=_AS_NEW),
    State.LOST: _row(
        State.LOST,
        abort=Cell(State.FINISHED, "the front end forgets it"),
        deadline=Cell(State.FINISHED, "the front end ends it: error 503, deadline_exceeded"),
        resume=Cell(State.WAITING, "continues on the new engine as if nothing had happened"),
        shutdown=Cell(State.FINISHED, "the front end ends it: error 503, server_shutting_down"),
    ),
}
"""Duplicates (an Add for a request that is not over) are ignored, whatever their attempt."""


def markdown() -> str:
    """The table as the docs show it."""
    lines = [
        "| state | " + " | ".join(Event) + " |",
        "| --- |" + " --- |" * len(Event),
    ]
    for state, cells in TABLE.items():
        texts = [
            "" if not c.effect and c.next is state else f"**{c.next}**: {c.effect}" for c in cells.values()
        ]
        lines.append(f"| {state} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"
