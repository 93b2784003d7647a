"""One choice's answer as text: tokens in, text out, why it ended, what it counts."""

from __future__ import annotations

from servelite.frontend.engine_client import EngineClient
from servelite.frontend.parsers.events import Event
from servelite.frontend.parsers.parser import AnswerParser
from servelite.frontend.request import RequestRecord
from servelite.frontend.sampling import Sampling
from servelite.frontend.thinking import count_reasoning
from servelite.ipc.messages import FinishReason
from servelite.tokenizer.detokenizer import Detokenizer
from servelite.tokenizer.tokenizer import Tokenizer

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Answer:
    """Read with `await next()` (or `await read()`) until `finish_reason` is set. Always `close` it.

    Attributes:
        prompt_text: what `echo` shows before it.
        parser: tells reasoning and calls from content; None: all of it is content.
        completion_tokens: how many tokens it has so far, a stop token or what completes a stop string
            included; what the engine produced beyond a stop string does not count.
    """

    def __init__(
        self,
        engine: EngineClient,
        record: RequestRecord,
        tokenizer: Tokenizer,
        sampling: Sampling,
        prompt_text: str = "",
        parser: AnswerParser | None = None,
        markers: frozenset[int] = frozenset(),
        reasoning_end: int | None = None,
    ) -> None:
        """
        Args:
            parser: reads the text, by `read`.
            markers: the control tokens that it has to see.
            reasoning_end: the token that closes reasoning; None: not known to be one.
        """
        self._reasoning_end = reasoning_end
        self._engine = engine
        self._nothing = sampling.max_tokens == 0  # the engine gives one token, which is not written
        self._stop_token_ids = sampling.stop_token_ids
        self._include_stop = sampling.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=sampling.stop,
            include_stop=self._include_stop,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            kept=markers if parser is not None else frozenset(),
        )
        self.parser = parser
        self.record = record
        self.prompt_text = prompt_text
        self.finish_reason: str | None = None
        self.completion_tokens = 0

    async def next(self) -> str:
        """Wait for tokens (or a `wake`) and return the text that is now safe to send, maybe none.

        Raises:
            ClientGone: the client closed the connection.
            APIError: the engine refused or lost the request.
        """
        if not self.record.has_news:
            await self.record.news()
        return self._take()

    def _take(self) -> str:
        """`next`, without waiting."""
        record = self.record
        tokens = record.take()
        if self._nothing:
            tokens.clear()
        self.completion_tokens += len(tokens)
        finish = record.finish
        if finish is FinishReason.STOP and tokens and not self._include_stop:
            tokens.pop()  # the stop token itself is no text
        text = self._detokenizer.push(tokens) if tokens else ""
        if finish in _REASONS:
            text += self._detokenizer.finish()  # which may complete a stop string
            self.finish_reason = _REASONS[finish]
        if self._detokenizer.stopped is not None:
            self.completion_tokens = self._detokenizer.stop_token_count
            self.finish_reason = "stop"
            self._engine.abort(record, "stop")
        return text

    async def read(self) -> list[Event]:
        """`next`, by the parser, which there is: what the text means, as far as that is certain."""
        assert self.parser is not None
        if not self.record.has_news:  # not `next`: a frame less to go through, once a token
            await self.record.news()
        text = self._take()
        events = self.parser.push(text) if text else []
        if self.finish_reason is not None:
            events += self.parser.finish()
            if self.finish_reason == "stop" and self.parser.ends_in_calls:
                self.finish_reason = "tool_calls"
        return events

    @property
    def stop_reason(self) -> str | int | None:
        """The client's own stop string or stop token that ended it; None: something else did."""
        if self._detokenizer.stopped is not None or self.record.finish is not FinishReason.STOP:
            return self._detokenizer.stopped
        last = self.record.produced[-1:]
        return last[0] if last and last[0] in self._stop_token_ids else None

    @property
    def reasoning_tokens(self) -> int | None:
        """How many of its tokens so far are reasoning; None: that cannot be told apart."""
        if self.parser is None or self._reasoning_end is None:
            return None
        return count_reasoning(self.token_ids, self._reasoning_end) if self.parser.has_reasoned else 0

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens so far, a stop token included."""
        return self.record.produced[: self.completion_tokens]

    def close(self) -> None:
        """Whoever read the answer is done with it: the engine stops if it has not."""
        self._engine.abort(self.record, "abort")
        self.record.place.leave()
