"""One choice's answer as text: tokens in, text out, why it ended, what it counts."""

from __future__ import annotations

from servelite.frontend.engine_client import EngineClient
from servelite.frontend.request import RequestRecord
from servelite.frontend.sampling import Sampling
from servelite.ipc.messages import FinishReason
from servelite.tokenizer.detokenizer import Detokenizer
from servelite.tokenizer.tokenizer import Tokenizer

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Answer:
    """Read with `await next()` until `finish_reason` is set. Always `close` it.

    Attributes:
        prompt_text: what `echo` shows before it.
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
    ) -> None:
        self._engine = engine
        self._include_stop = sampling.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=sampling.stop,
            include_stop=self._include_stop,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )
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
        record = self.record
        if not record.has_news:
            await record.news()
        tokens = record.take()
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

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens so far, a stop token included."""
        return self.record.produced[: self.completion_tokens]

    def close(self) -> None:
        """Whoever read the answer is done with it: the engine stops if it has not."""
        self._engine.abort(self.record, "abort")
        self.record.place.leave()
