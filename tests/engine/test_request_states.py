"""Every cell of the state x event table, on the simulated runner, at depth 3 (and 1 where it differs).

Depth 3 leaves two steps in flight between turns, so that an end with one result still leaves one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from servelite.ipc.messages import FinishReason, Stop
from servelite.ipc.states import TABLE, Event, State, markdown
from tests.engine_harness import CLIENT, Answer, prompt, simulated

PROMPT = prompt(20)
MAX_TOKENS = 12


class Subject:
    """One request under test, the engine it is in, and others that hold rows and blocks beside it."""

    def __init__(self, **settings: object) -> None:
        self.settings = {"async_depth": 3, "max_num_seqs": 3, "max_num_batched_tokens": 16} | settings
        self.harness = simulated(**self.settings)  # type: ignore[arg-type]
        self.number = 0
        self.lost: Answer | None = None  # what the front end kept of an engine that died
        self.stop_at: int | None = None
        self.deadline_ms = -1

    @property
    def now(self) -> State:
        """The request's state as the engine has it, or as its end was told."""
        if self.lost is not None:
            return State.LOST
        request = self.harness.scheduler.requests.find((CLIENT, self.number))
        if request is not None:
            return request.state
        answer = self.harness.answers.get(self.number)
        return State.REFUSED if answer and answer.error and answer.error.status == 400 else State.FINISHED

    def add(self, **fields: object) -> None:
        values = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "seed": 7, "deadline_ms": self.deadline_ms}
        self.number = self.harness.add(**(values | fields), request=self.number or 1000)  # type: ignore[arg-type]

    def turn_until(self, done: Callable[[], bool]) -> None:
        for _ in range(200):
            if done():
                return
            self.harness.turn()
        raise AssertionError(f"stuck in {self.now}")

    def kill_engine(self) -> None:
        """The engine is gone; the front end keeps what it was told."""
        was_over = self.now in (State.REFUSED, State.FINISHED, State.FINISHING)
        answer = self.harness.answers.get(self.number, Answer())
        self.harness.close()
        self.harness = simulated(**self.settings, epoch=2)  # type: ignore[arg-type]
        if was_over:
            self.harness.answers[self.number] = answer  # the client has been told
        else:
            self.lost = answer

    def resume(self) -> None:
        kept = self.lost or Answer()
        self.lost = None
        self.add(produced=kept.tokens, attempt=1)

    def tick(self, seconds: float) -> None:
        requests, clock = self.harness.scheduler.requests, self.harness.scheduler.requests.clock
        requests.clock = lambda: clock() + seconds


def refused(subject: Subject) -> None:
    subject.add(prompt=[])
    subject.harness.turn()


def waiting(subject: Subject) -> None:
    for i in range(3):
        subject.harness.add(prompt(8, i), max_tokens=40)
    subject.turn_until(lambda: subject.harness.mailbox.load.running == 3)
    subject.add()
    subject.harness.turn()


def parked(subject: Subject) -> None:
    leader = subject.harness.add(prompt(200), max_tokens=4)
    subject.add(prefix_of=leader)
    subject.harness.turn(2)


def running(subject: Subject) -> None:
    subject.add()
    subject.turn_until(lambda: len(subject.harness.answers.get(subject.number, Answer()).tokens) == 3)


def preempted(subject: Subject) -> None:
    running(subject)
    request = subject.harness.scheduler.requests.find((CLIENT, subject.number))
    assert request is not None
    subject.harness.scheduler.requests.preempt(request.row)


def finishing(subject: Subject) -> None:
    running(subject)
    subject.harness.abort(subject.number)
    subject.harness.core._take_messages(block=False)


def finished(subject: Subject) -> None:
    subject.add()
    subject.turn_until(
        lambda: subject.harness.answers.get(subject.number, Answer()).finish != FinishReason.NONE
    )
    subject.harness.drain()
    subject.harness.answers.pop(subject.number)


def lost(subject: Subject) -> None:
    running(subject)
    subject.kill_engine()


REACH: dict[State, Callable[[Subject], None]] = {
    State.REFUSED: refused,
    State.WAITING: waiting,
    State.PARKED: parked,
    State.RUNNING: running,
    State.PREEMPTED: preempted,
    State.FINISHING: finishing,
    State.FINISHED: finished,
    State.LOST: lost,
}


@dataclass
class Outcome:
    """What the event did, seen from outside."""

    error: str | None


def happen(subject: Subject, state: State, event: Event) -> None:
    """Let `event` happen to the request, as it would come about."""
    harness = subject.harness
    match event:
        case Event.ADD | Event.REFUSE | Event.RESUME if state is State.REFUSED or state is State.FINISHED:
            harness.answers.pop(subject.number, None)
    match event:
        case Event.ADD:
            if state is State.LOST:
                return  # a front end that lost a request resumes it; it has no plain Add to send
            subject.add()
            harness.core._take_messages(block=False)
        case Event.REFUSE:
            if state is State.LOST:
                return
            subject.add(prompt=[])
            harness.core._take_messages(block=False)
            harness.core._publish()
        case Event.ABORT:
            harness.abort(subject.number)
            harness.core._take_messages(block=False)
            if state is State.LOST:
                subject.lost = None  # the front end's own doing; the engine never knew
        case Event.FINISH:
            finish(subject, state)
        case Event.PREEMPT:
            row = (
                request.row if (request := harness.scheduler.requests.find((CLIENT, subject.number))) else -1
            )
            if row in harness.scheduler.requests.order:
                harness.scheduler.requests.preempt(row)
        case Event.ENGINE_DEATH:
            subject.kill_engine()
        case Event.RESUME:
            subject.resume()
            subject.harness.core._take_messages(block=False)
        case Event.DEADLINE:
            subject.tick(3600.0)
            harness.scheduler.requests.expire()
            harness.core._publish()
            if state is State.LOST:
                subject.lost = None
        case Event.SHUTDOWN:
            harness.send(Stop())
            harness.turn()
            if state is State.LOST:
                subject.lost = None


def finish(subject: Subject, state: State) -> None:
    """A result with the request's last token comes in, where a step of it is in flight."""
    harness = subject.harness
    request = harness.scheduler.requests.find((CLIENT, subject.number))
    if request is None or request.row < 0:
        return
    if state is not State.FINISHING:
        harness.scheduler.requests.rows.limit[request.row] = harness.scheduler.requests.rows.num_known[
            request.row
        ]
    for _ in range(len(harness.core._in_flight) if state is State.FINISHING else 1):
        harness.core._complete(harness.core._in_flight.popleft())
    harness.core._publish()


@pytest.mark.parametrize("event", list(Event))
@pytest.mark.parametrize("state", list(State))
def test_cell(state: State, event: Event) -> None:
    subject = Subject()
    if event is Event.DEADLINE:
        subject.deadline_ms = 1_800_000
    REACH[state](subject)
    assert subject.now is state
    told = len(subject.harness.answers.get(subject.number, Answer()).tokens)
    happen(subject, state, event)
    cell = TABLE[state][event]
    assert subject.now is cell.next, cell.effect
    error = subject.harness.answers.get(subject.number, Answer()).error
    if "deadline_exceeded" in cell.effect and state is not State.LOST:
        assert error is not None and (error.status, error.code) == (503, "deadline_exceeded")
    if "server_shutting_down" in cell.effect and state is not State.LOST:
        assert error is not None and (error.status, error.code) == (503, "server_shutting_down")
    if not cell.effect and state not in (State.REFUSED, State.FINISHED) and event is not Event.PREEMPT:
        assert len(subject.harness.answers.get(subject.number, Answer()).tokens) == told
    if subject.lost is None:
        subject.harness.scheduler.requests.check()
        if event is not Event.SHUTDOWN:
            subject.harness.drain()
        subject.harness.assert_empty()
    subject.harness.close()


@pytest.mark.parametrize("state", [State.RUNNING, State.PREEMPTED])
@pytest.mark.parametrize("event", [Event.ABORT, Event.FINISH])
def test_at_depth_1_nothing_is_in_flight_between_turns_so_an_end_is_at_once(
    state: State, event: Event
) -> None:
    subject = Subject(async_depth=1)
    REACH[state](subject)
    if event is Event.ABORT:
        subject.harness.abort(subject.number)
        subject.harness.core._take_messages(block=False)
        assert subject.now is State.FINISHED
    subject.harness.drain()
    subject.harness.assert_empty()
    subject.harness.close()


def test_an_abort_that_comes_with_its_request() -> None:
    subject = Subject()
    subject.add()
    subject.harness.abort(subject.number)
    subject.harness.turn()
    assert subject.now is State.FINISHED and not subject.harness.answers
    assert subject.harness.scheduler.requests.totals.steps == 0
    subject.harness.assert_empty()
    subject.harness.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_abort_while_the_prompt_is_computed(depth: int) -> None:
    subject = Subject(async_depth=depth)
    subject.add(prompt=prompt(200))  # 16 tokens a step
    subject.harness.turn(5)
    totals = subject.harness.scheduler.requests.totals
    began = totals.steps
    assert subject.now is State.RUNNING and not subject.harness.answers
    subject.harness.abort(subject.number)
    subject.turn_until(lambda: subject.now is State.FINISHED)
    assert totals.steps <= began + depth + 1
    subject.harness.drain()
    assert not subject.harness.answers  # not a token of it was told
    subject.harness.assert_empty()
    subject.harness.close()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("state", [s for s in State if s is not State.LOST])
def test_aborting_twice_is_aborting_once(state: State, together: bool) -> None:
    subject = Subject()
    REACH[state](subject)
    counted = subject.harness.scheduler.requests.totals.aborted
    told = subject.harness.answers.get(subject.number)
    before = len(told.tokens) if told else 0
    subject.harness.abort(subject.number)
    if not together:
        subject.harness.turn()
    subject.harness.abort(subject.number, subject.number)
    subject.harness.drain()
    once = state not in (State.REFUSED, State.FINISHED, State.FINISHING)
    assert subject.harness.scheduler.requests.totals.aborted == counted + once
    told = subject.harness.answers.get(subject.number)
    assert (len(told.tokens) if told else 0) == before
    subject.harness.assert_empty()
    subject.harness.close()


@pytest.mark.parametrize("state", [State.WAITING, State.PARKED, State.RUNNING, State.PREEMPTED])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_answer_resumed_after_an_engine_death_is_the_undisturbed_one(state: State, depth: int) -> None:
    calm = Subject(async_depth=depth)
    calm.add()
    calm.harness.drain()
    expected = calm.harness.answers[calm.number].tokens
    calm.harness.close()
    subject = Subject(async_depth=depth)
    REACH[state](subject)
    subject.kill_engine()
    kept = subject.lost.tokens if subject.lost else []
    subject.resume()
    subject.harness.drain()
    assert kept + subject.harness.answers[subject.number].tokens == expected
    subject.harness.assert_empty()
    subject.harness.close()


def test_the_table_is_complete_and_in_the_docs() -> None:
    from pathlib import Path

    assert set(TABLE) == set(State)
    assert all(set(cells) == set(Event) for cells in TABLE.values())
    page = Path(__file__).parents[2] / "docs" / "request-states.md"
    assert markdown() in page.read_text()
