"""Collects what one step gave, as columns, and cuts it into one message a front end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from servelite.ipc.messages import (
    FLAG,
    NUMBER,
    TOKEN,
    FinishReason,
    Load,
    Outputs,
    RequestError,
    Timings,
    TokenLogprobs,
    pack,
)


@dataclass
class _SideTables:
    errors: dict[int, RequestError] = field(default_factory=dict)
    timings: dict[int, Timings] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    vectors: dict[int, bytes] = field(default_factory=dict)


class Outbox:
    """Written by the scheduler, emptied by the loop once an iteration."""

    def __init__(self, engine: int = 0, epoch: int = 0) -> None:
        self._engine, self._epoch = engine, epoch
        self._columns: list[tuple[npt.NDArray, ...]] = []  # client, number, first index, finish, token
        self._sides: dict[int, _SideTables] = {}

    def add_tokens(
        self,
        clients: npt.NDArray[np.int32],
        numbers: npt.NDArray[np.int64],
        index: npt.NDArray[np.int32],
        finish: npt.NDArray[np.int8],
        tokens: npt.NDArray[np.int32],
    ) -> None:
        """One token for each of some requests. All 1-D and of equal length."""
        if len(tokens):
            self._columns.append((clients, numbers, index, finish, tokens))

    def add_error(self, client: int, number: int, error: RequestError) -> None:
        """The request ended with an error; its finish reason is set at `take`."""
        self._side(client).errors[number] = error

    def add_vector(self, client: int, number: int, vector: bytes) -> None:
        """The request ended with its prompt's vector (float32)."""
        self._side(client).vectors[number] = vector

    def add_timings(self, client: int, number: int, timings: Timings) -> None:
        """Where the time of a request that ended went."""
        self._side(client).timings[number] = timings

    def add_logprobs(self, client: int, number: int, logprobs: TokenLogprobs) -> None:
        """Logprobs of the request's latest tokens."""
        _append(self._side(client).logprobs, number, logprobs)

    def add_prompt_logprobs(self, client: int, number: int, logprobs: TokenLogprobs) -> None:
        """Logprobs of the next tokens of the request's prompt."""
        _append(self._side(client).prompt_logprobs, number, logprobs)

    def _side(self, client: int) -> _SideTables:
        return self._sides.setdefault(client, _SideTables())

    def take(self, step: int, load: Load) -> dict[int, Outputs]:
        """The messages by client, in columns; the outbox is empty after."""
        columns = (
            [np.concatenate(parts) for parts in zip(*self._columns, strict=True)] if self._columns else []
        )
        clients = set(self._sides) | (set(np.unique(columns[0]).tolist()) if columns else set())
        messages = {client: self._message(client, columns, step, load) for client in clients}
        self._columns.clear()
        self._sides.clear()
        return messages

    def load_only(self, step: int, load: Load) -> Outputs:
        """A message that carries nothing but the load."""
        return Outputs(self._engine, self._epoch, step, load)

    def _message(self, client: int, columns: list[npt.NDArray], step: int, load: Load) -> Outputs:
        numbers, index, finish, tokens = (
            [column[columns[0] == client] for column in columns[1:]]
            if columns
            else [np.empty(0, dtype) for dtype in (NUMBER, TOKEN, FLAG, TOKEN)]
        )
        counts = np.ones(len(numbers), dtype=TOKEN)
        side = self._sides.get(client, _SideTables())
        ended = dict.fromkeys(side.vectors, FinishReason.STOP)  # without a token
        ended |= dict.fromkeys(side.errors, FinishReason.ERROR)
        reasons, nothing = list(ended.values()), np.zeros(len(ended), dtype=TOKEN)
        return Outputs(
            engine=self._engine,
            epoch=self._epoch,
            step=step,
            load=load,
            requests=pack(np.concatenate([numbers, np.asarray(list(ended), dtype=NUMBER)]), NUMBER),
            first_index=pack(np.concatenate([index, nothing])),
            counts=pack(np.concatenate([counts, nothing])),
            finish=pack(np.concatenate([finish, np.asarray(reasons, dtype=FLAG)]), FLAG),
            tokens=pack(tokens),
            errors=side.errors,
            timings=side.timings,
            logprobs=side.logprobs,
            prompt_logprobs=side.prompt_logprobs,
            vectors=side.vectors,
        )


def _append(table: dict[int, TokenLogprobs], number: int, more: TokenLogprobs) -> None:
    """Two steps can be published at once: their tokens follow one another."""
    have = table.get(number)
    if have is not None:
        chosen, ids, values = have.chosen + more.chosen, have.ids + more.ids, have.values + more.values
        more = TokenLogprobs(have.first_index, have.k, chosen, ids, values)
    table[number] = more
