"""Requests that a grammar binds: compiled while they wait, masked while they run.

The scheduler and the loop know a few hooks, and nothing of grammars. A request waits parked until a thread
has compiled its grammar and taken it as far as the answer has come (a resumed one is not at its beginning);
from then on its matcher belongs to the loop's thread, and to the request: through preemption it stays.

A request's matcher knows every token that has come back. So masks are made after the steps in flight have
completed, while the next forward pass runs.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from time import thread_time
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from servelite.engine.request import Constraint, Request, RowTable
from servelite.ipc.masks import pack_masks
from servelite.ipc.messages import Add, Plan, RequestError, unpack
from servelite.ipc.states import State
from servelite.tokenizer.compile_thread import compile_thread
from servelite.tokenizer.grammar import GrammarError, GrammarLimitError, Grammars, Matcher

log = logging.getLogger(__name__)

REJECTED: Final = -1
TOO_MUCH: Final = -2
OVER: Final = 1

DEAD_END: Final = RequestError(
    400, "grammar_dead_end", "no token is left that both the grammar and the other parameters allow"
)
TOO_SLOW: Final = RequestError(
    400, "grammar_too_complex", "the grammar: finding what may come next takes too long, time after time"
)
ENDS: Final = {
    REJECTED: DEAD_END,
    TOO_MUCH: RequestError(400, "grammar_too_complex", "the grammar: following it takes too many states"),
}
"""By verdict, what becomes of a request whose token is not taken."""
FAILED: Final = RequestError(500, "grammar_failed", "the engine could not compile the grammar")

MASK_PER_TOKEN_S: Final = (
    0.004  # CPU time of a mask that costs its answer nothing; all streams wait for masks
)
MASK_ALLOWANCE_S: Final = 0.25  # for what masks take beyond that; cheaper ones fill it up again

_CACHED: Final = 32  # grammars that are kept compiled
_WAIT_S: Final = 0.002  # for how long an engine where nothing runs does not look at its messages
_SHORT_CHARS: Final = 8 << 10  # of a grammar that waits for no longer one
_CACHED_CHARS: Final = 64 << 10  # of the longest that is kept: large ones take memory

Loader = Callable[[], Grammars]


def bind(add: Add) -> tuple[Add, Constraint | None]:
    """The grammar's part of an Add, and the Add without it.

    `min_tokens` goes along: the runner would forbid the end of an answer that nothing else may follow.
    """
    if not add.grammar:
        return add, None
    sampling = msgspec.structs.replace(add.sampling, min_tokens=0)
    constraint = Constraint(add.grammar, add.sampling.min_tokens)
    return msgspec.structs.replace(add, sampling=sampling), constraint


class RequestGrammars:
    """Compiles, masks and follows. One thread calls it, but for what compiles."""

    def __init__(self, load: Loader | None, vocab_size: int) -> None:
        """
        Args:
            load: reads the vocabulary, when the first grammar comes; None: no request has a grammar.
            vocab_size: of the model; masks forbid what the tokenizer does not have of it.
        """
        self.supported = load is not None
        self._load = load
        self._num_words = -(-vocab_size // 32)
        self._grammars: Grammars | None = None
        self._short, self._long = compile_thread("grammars"), compile_thread("long-grammars")
        self._pending: dict[Future[Matcher], Request] = {}
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()  # each at its grammar's beginning
        self._lock = threading.Lock()  # of `_compiled`
        self._loading = threading.Lock()  # of `_grammars`

    # ------------------------------------------------------------ before a request runs

    def must_wait(self, request: Request) -> bool:
        """Whether the request's grammar is still to be compiled; if so, that has begun now."""
        constraint = request.constraint
        if constraint is None or constraint.matcher is not None:
            return False
        produced = request.tokens[request.prompt_len :].tolist()
        thread = self._long if len(constraint.text) > _SHORT_CHARS else self._short
        self._pending[thread.submit(self._compile, constraint.text, produced)] = request
        return True

    @property
    def pending(self) -> bool:
        """Whether something is being compiled."""
        return bool(self._pending)

    def wait(self) -> None:
        """Wait until something has been compiled, or messages should be looked at."""
        wait(self._pending, _WAIT_S, FIRST_COMPLETED)

    def take(self) -> list[tuple[Request, RequestError | None]]:
        """The requests whose grammar is ready, or cannot be used; those that ended meanwhile apart."""
        ready: list[tuple[Request, RequestError | None]] = []
        for future in [future for future in self._pending if future.done()]:
            request = self._pending.pop(future)
            if request.state is not State.PARKED or request.constraint is None:
                continue
            error = future.exception()
            if error is None:
                request.constraint.matcher = future.result()
                ready.append((request, None))
            elif isinstance(error, GrammarError):
                ready.append((request, RequestError(400, "invalid_grammar", f"the grammar: {error}")))
            else:
                log.error("a grammar could not be compiled: %r", error)
                ready.append((request, FAILED))
        return ready

    def _compile(self, text: str, produced: list[int]) -> Matcher:
        """In the thread: a matcher for an answer that has come as far as `produced`."""
        with self._lock:
            matcher = self._compiled.get(text)
        if matcher is None:
            with self._loading:
                if self._grammars is None:
                    assert self._load is not None, "admission refuses what is not supported"
                    self._grammars = self._load()
            matcher = self._grammars.compile(text)
            self._keep(text, matcher)
        mine = matcher.copy()
        mine.accept(produced)
        return mine

    def _keep(self, text: str, matcher: Matcher) -> None:
        if len(text) <= _CACHED_CHARS:
            with self._lock:
                self._compiled[text] = matcher
                if len(self._compiled) > _CACHED:
                    self._compiled.popitem(last=False)

    def _drop(self, text: str) -> None:
        """Compile the grammar anew next time: copies of a matcher share what has grown too large."""
        with self._lock:
            self._compiled.pop(text, None)

    # ------------------------------------------------------------ while it runs

    def masks(self, table: RowTable, plan: Plan) -> tuple[bytes, list[tuple[Request, RequestError]]]:
        """The masks for the plan's rows, and the requests that can go on no further.

        No other step may be in flight. A row that has ended since the plan was made gets no mask: what it
        draws is dropped.
        """
        rows = unpack(plan.rows)
        bound = (
            table.constrained[rows] & table.running[rows] & (table.num_tokens[rows] > table.num_known[rows])
        )
        rows = rows[bound]
        words = np.zeros((len(rows), self._num_words), np.uint32)
        alive, dead = np.ones(len(rows), np.bool_), []
        for at, row in enumerate(rows.tolist()):
            request = table.requests[row]
            assert request is not None
            error = self._fill(request, int(table.num_known[row] - table.prompt_len[row]), words[at])
            if error is not None:
                alive[at] = False
                dead.append((request, error))
        return pack_masks(rows[alive], words[alive]), dead

    def _fill(self, request: Request, index: int, words: npt.NDArray[np.uint32]) -> RequestError | None:
        """The mask of the request's next token, its `index`-th; or why there can be none."""
        constraint, sampling = request.constraint, request.add.sampling
        assert constraint is not None and constraint.matcher is not None
        began = thread_time()
        try:
            constraint.matcher.fill(words)
        except GrammarError as error:
            self._drop(constraint.text)
            return RequestError(400, "grammar_too_complex", f"the grammar: {error}")
        taken = constraint.mask_seconds + thread_time() - began - MASK_PER_TOKEN_S
        constraint.mask_seconds = max(taken, 0.0)
        if constraint.mask_seconds > MASK_ALLOWANCE_S:
            return TOO_SLOW
        if index < constraint.min_tokens:
            _hold_back(words, sampling.stop_token_ids)
        if not constraint.matcher.end_ids.intersection(sampling.stop_token_ids):  # ignore_eos
            _hold_back(words, constraint.matcher.end_ids)
        return None if words.any() else DEAD_END

    def advance(
        self, table: RowTable, rows: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int8]:
        """The answers of `rows` go on with `tokens`: OVER, one of `ENDS`, or 0 for each.

        A token is rejected where masks and other parameters left none, and the runner took one all the same.
        """
        verdicts = np.zeros(len(rows), np.int8)
        for at in np.flatnonzero(table.constrained[rows]).tolist():
            request = table.requests[rows[at]]
            assert request is not None and request.constraint is not None
            matcher = request.constraint.matcher
            assert matcher is not None
            try:
                matcher.accept([int(tokens[at])])
            except GrammarError as error:
                verdicts[at] = TOO_MUCH if isinstance(error, GrammarLimitError) else REJECTED
                if verdicts[at] == TOO_MUCH:
                    self._drop(request.constraint.text)
            else:
                verdicts[at] = OVER if matcher.over else 0
        return verdicts

    def close(self) -> None:
        """End the threads, without waiting for what they compile."""
        for thread in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)


def _hold_back(words: npt.NDArray[np.uint32], tokens: frozenset[int] | tuple[int, ...]) -> None:
    """Forbid `tokens`, unless nothing else is left: an answer that cannot go on ends."""
    kept = words.copy()
    for token in tokens:
        if token // 32 < len(kept):
            kept[token // 32] &= ~np.uint32(1 << token % 32)
    if kept.any():
        words[:] = kept
