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


class RowTable:
    """Columns of the running requests, by row: what the scheduler reads and writes each step.

    `num_tokens` counts placeholders too: tokens whose step is in flight and whose values the host
    does not know. `num_known` counts the others, which lie in `tokens`. `num_computed` counts the
    tokens whose KV entries have been submitted, `num_done` those whose step has completed. `limit` is
    how many are ever computed: the last token of an answer is not.
    """

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.num_rows = n = num_rows
        self.num_tokens = np.zeros(n, np.int32)
        self.num_known = np.zeros(n, np.int32)
        self.num_computed = np.zeros(n, np.int32)
        self.num_done = np.zeros(n, np.int32)
        self.prompt_len = np.zeros(n, np.int32)
        self.limit = np.zeros(n, np.int32)
        self.in_flight = np.zeros(n, np.int32)
        self.generation = np.zeros(n, np.int32)
        self.client = np.zeros(n, np.int32)
        self.number = np.zeros(n, np.int64)
        self.running = np.zeros(n, np.bool_)  # may be scheduled; others are free, or held by steps in flight
        self.suspect = np.zeros(n, np.bool_)  # was in a step that failed, and has had no token since
        self.prompt_logprobs = np.zeros(n, np.bool_)
        self.constrained = np.zeros(n, np.bool_)  # the answer follows a grammar
        self.stop_ids = np.full((n, STOP_COLUMNS), -1, np.int32)  # padded with -1
        self.many_stops = np.zeros(n, np.bool_)
        self.tokens = np.zeros((n, max_model_len), np.int32)  # touched lazily
        self.requests: list[Request | None] = [None] * n
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
