"""What a front end keeps of one request: all that it takes to resubmit it, and its tokens as they come."""

from __future__ import annotations

import asyncio
import time

import msgspec

from servelite.frontend.admission import Place
from servelite.frontend.body import ClientGone
from servelite.frontend.errors import APIError, deadline_exceeded
from servelite.frontend.logprobs import LogprobTable
from servelite.ipc.messages import TOKEN, Add, FinishReason, pack, unpack


class RequestRecord:
    """One request at the engine.

    One consumer takes its tokens. The reader of the engine's socket appends and wakes the consumer
    once a step; what comes while the consumer is busy with a slow client merges, so a slow client
    costs only itself.
    """

    __slots__ = (
        "_add", "_ended", "_gone", "_loop", "_taken", "_waiter", "arrived", "attempt", "cached_tokens",
        "error", "finish", "last_token_at", "logprobs", "number", "place", "produced", "prompt_logprobs",
        "vector",
    )  # fmt: skip

    def __init__(self, add: Add, place: Place) -> None:
        self._add = add
        self.number = add.request
        self.place = place
        self.attempt = 0
        self.produced: list[int] = []
        self.logprobs = LogprobTable(0)
        self.prompt_logprobs = LogprobTable(1)
        self.vector = b""  # float32, of a prompt that is pooled
        self.cached_tokens = 0  # of the prompt, found in the prefix cache
        self.finish = FinishReason.NONE
        self.error: APIError | None = None
        self.arrived = time.monotonic()
        self.last_token_at = 0.0
        self._taken = 0
        self._gone = False
        self._ended = False  # finished, failed or gone: nothing is waited for any more
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def choice(self) -> int:
        """Which of the answers to its prompt it is."""
        return self._add.choice

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._add.prompt) // TOKEN.itemsize

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's token IDs."""
        return unpack(self._add.prompt).tolist()

    @property
    def leader(self) -> int:
        """The request whose prompt this one shares and waits for; -1: none."""
        return self._add.prefix_of

    def first_message(self) -> Add:
        """The Add that starts this request."""
        return self._add

    def resume_message(self, *, with_leader: bool) -> Add:
        """The Add that goes on after the tokens it has, at an engine that knows nothing of it.

        Args:
            with_leader: the request it waits for is resumed as well, and has had no token.

        Raises:
            APIError: its deadline has passed, and it has had no token.
        """
        self.attempt += 1
        add, begun = self._add, bool(self.produced)
        deadline_ms = -1
        if add.deadline_ms >= 0 and not begun:
            deadline_ms = add.deadline_ms - int((time.monotonic() - self.arrived) * 1000)
            if deadline_ms < 0:
                raise deadline_exceeded(add.deadline_ms)
        sampling = add.sampling
        if begun and sampling.prompt_logprobs >= 0:  # they came before the first token
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        return msgspec.structs.replace(
            add,
            attempt=self.attempt,
            produced=pack(self.produced),
            sampling=sampling,
            deadline_ms=deadline_ms,
            prefix_of=add.prefix_of if with_leader else -1,
        )

    def note_cached(self, tokens: int) -> None:
        """How much of the prompt was in the prefix cache: what its first token was told to cost stays so."""
        if not (self.attempt and self.produced):
            self.cached_tokens = tokens

    def deliver(self, first_index: int, tokens: list[int], finish: int) -> None:
        """Append what is new of `tokens`, the first of which is the answer's token `first_index`.

        Raises:
            ValueError: there is a gap; tokens were lost.
        """
        known = len(self.produced) - first_index
        if known:  # else, as nearly always, all of them are new
            if known < 0:
                raise ValueError(
                    f"request {self.number}: tokens {len(self.produced)} to {first_index - 1} are missing"
                )
            tokens = tokens[known:]
        self.produced += tokens
        if finish:
            self.finish = FinishReason(finish)
            self._ended = True
        self.wake()

    def fail(self, error: APIError) -> None:
        """End with an error, after what was delivered."""
        self.error = error
        self._ended = True
        self.wake()

    def client_gone(self) -> None:
        """The consumer's next call raises `ClientGone`."""
        self._gone = self._ended = True
        self.wake()

    def wake(self) -> None:
        """Let the consumer look again."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():  # the consumer may have been cancelled
                waiter.set_result(None)

    @property
    def has_news(self) -> bool:
        """Whether the consumer need not wait."""
        return self._taken < len(self.produced) or self._ended

    def news(self) -> asyncio.Future[None]:
        """To be awaited where there is no news: done at the next `wake`."""
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def take(self) -> list[int]:
        """The tokens that came since the last call.

        Raises:
            ClientGone: nobody wants them.
            APIError: the request failed; raised once its tokens were taken.
        """
        if self._gone:
            raise ClientGone
        if self.error is not None and self._taken == len(self.produced):
            raise self.error.with_traceback(None)  # one error may end many requests
        tokens = self.produced[self._taken :]
        self._taken += len(tokens)
        return tokens
