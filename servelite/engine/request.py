"""A request as the engine holds it, and the columns of those that have a row."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from servelite.ipc.messages import Add
from servelite.ipc.states import State
from servelite.tokenizer.grammar import Matcher

STOP_COLUMNS: Final = 8
"""Stop tokens of a row that are compared in one vector operation; rows with more are rare."""


class WaitingOn(enum.StrEnum):
    """What a parked request waits for."""

    PREFIX = "prefix"  # another request's prompt, which it shares
    GRAMMAR = "grammar"  # its grammar, to be compiled


@dataclass(slots=True, eq=False)
class Constraint:
    """The grammar that a request's answer follows."""

    text: str
    min_tokens: int  # the request's; the runner is not told of it
    matcher: Matcher | None = None  # None until it is compiled
    mask_seconds: float = 0.0  # of the allowance for masks: used up


@dataclass(slots=True, eq=False)
class Request:
    """What is per request and not per step. Its counters live in `RowTable` while it has a row."""

    client: int
    add: Add
    tokens: npt.NDArray[np.int32]  # prompt and output known so far; current only while it has no row
    prompt_len: int
    arrived: float  # seconds, the engine's clock
    rank: tuple[int, int] = (0, 0)  # (class, order within it); lower runs first
    deadline: float | None = None  # on the engine's clock
    state: State = State.WAITING
    waiting_on: WaitingOn | None = None
    constraint: Constraint | None = None
    reads_cache: bool = True  # False: it needs all of its prompt's hidden states, which no cache has
    row: int = -1
    admitted: float | None = None  # first time a row was given
    first_token: float | None = None
    names: list[bytes] = field(default_factory=list)
    """Of its full blocks, by content: the prompt's from the front end, the others as they fill."""
    hit_blocks: int = 0  # of its row's blocks, those found in the cache
    cached_tokens: int = 0  # of the prompt, at its first admission
    distrusted: bool = False  # its tokens in flight come from blocks that a corrupted row computed
    failed_steps: int = 0  # in a row
    lost_tokens: int = 0  # computed ones, at its last preemption
    preemptions: int = 0
    recomputed_tokens: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """(client, number): how messages name it."""
        return self.client, self.add.request

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt's logprobs are still to be computed: its first token ends that."""
        return self.add.sampling.prompt_logprobs >= 0 and self.first_token is None

    @property
    def max_total(self) -> int:
        """Tokens at its longest: prompt and max_tokens."""
        return self.prompt_len + self.add.sampling.max_tokens


@dataclass(slots=True)
class RowTable:
    """Columns of the running requests, by row: what the scheduler reads and writes each step.

    `num_tokens` counts placeholders too: tokens whose step is in flight and whose values the host
    does not know. `num_known` counts the others, which lie in `tokens`. `num_computed` counts the
    tokens whose KV entries have been submitted, `num_done` those whose step has completed. `limit` is
    how many are ever computed: the last token of an answer is not.
    """

    num_rows: int
    max_model_len: int
    num_tokens: npt.NDArray[np.int32] = field(init=False)
    num_known: npt.NDArray[np.int32] = field(init=False)
    num_computed: npt.NDArray[np.int32] = field(init=False)
    num_done: npt.NDArray[np.int32] = field(init=False)
    prompt_len: npt.NDArray[np.int32] = field(init=False)
    limit: npt.NDArray[np.int32] = field(init=False)
    in_flight: npt.NDArray[np.int32] = field(init=False)
    generation: npt.NDArray[np.int32] = field(init=False)
    client: npt.NDArray[np.int32] = field(init=False)
    number: npt.NDArray[np.int64] = field(init=False)
    running: npt.NDArray[np.bool_] = field(init=False)
    """Rows that may be scheduled; others are free, or held by steps in flight."""
    suspect: npt.NDArray[np.bool_] = field(init=False)
    """Rows whose request was in a step that failed, and has had no token since."""
    prompt_logprobs: npt.NDArray[np.bool_] = field(init=False)
    constrained: npt.NDArray[np.bool_] = field(init=False)
    """Rows whose answer follows a grammar."""
    stop_ids: npt.NDArray[np.int32] = field(init=False)  # [rows, STOP_COLUMNS], padded with -1
    many_stops: npt.NDArray[np.bool_] = field(init=False)
    tokens: npt.NDArray[np.int32] = field(init=False)  # [rows, max_model_len], touched lazily
    requests: list[Request | None] = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        n = self.num_rows
        for name in (
            "num_tokens",
            "num_known",
            "num_computed",
            "num_done",
            "prompt_len",
            "limit",
            "in_flight",
            "generation",
        ):
            setattr(self, name, np.zeros(n, dtype=np.int32))
        self.client = np.zeros(n, dtype=np.int32)
        self.number = np.zeros(n, dtype=np.int64)
        self.running = np.zeros(n, dtype=np.bool_)
        self.suspect = np.zeros(n, dtype=np.bool_)
        self.prompt_logprobs = np.zeros(n, dtype=np.bool_)
        self.constrained = np.zeros(n, dtype=np.bool_)
        self.stop_ids = np.full((n, STOP_COLUMNS), -1, dtype=np.int32)
        self.many_stops = np.zeros(n, dtype=np.bool_)
        self.tokens = np.zeros((n, self.max_model_len), dtype=np.int32)
        self.requests = [None] * n
        self.free = list(range(n - 1, -1, -1))

    def seat(self, request: Request, num_computed: int) -> int:
        """Give the request a free row (there must be one) and fill its columns.

        Args:
            num_computed: tokens whose KV entries a prefix hit gives it.
        """
        row = self.free.pop()
        known, stops = len(request.tokens), request.add.sampling.stop_token_ids
        self.requests[row] = request
        self.generation[row] += 1
        self.tokens[row, :known] = request.tokens
        self.num_tokens[row] = self.num_known[row] = known
        self.num_computed[row] = self.num_done[row] = num_computed
        self.in_flight[row] = 0
        self.prompt_len[row] = request.prompt_len
        self.limit[row] = request.max_total - 1
        self.client[row], self.number[row] = request.key
        self.running[row] = True
        self.suspect[row] = request.failed_steps > 0
        self.prompt_logprobs[row] = request.wants_prompt_logprobs
        self.constrained[row] = request.constraint is not None
        self.stop_ids[row] = -1
        self.stop_ids[row, : min(len(stops), STOP_COLUMNS)] = stops[:STOP_COLUMNS]
        self.many_stops[row] = len(stops) > STOP_COLUMNS
        request.row = row
        return row

    def unseat(self, request: Request) -> None:
        """Take the row back; no step that touches it may be in flight."""
        row = request.row
        request.tokens = self.tokens[row, : self.num_known[row]].copy()
        request.row = -1
        self.requests[row] = None
        self.running[row] = False
        self.free.append(row)
