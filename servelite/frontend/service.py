"""One model served by one engine: from a validated request to an `Answer`. No HTTP here.

The front end process puts HTTP around it, `LLM` a thread.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from servelite.config import Settings
from servelite.frontend.admission import Admission, Place
from servelite.frontend.answer import Answer
from servelite.frontend.engine_client import EngineClient
from servelite.frontend.errors import APIError
from servelite.frontend.lifecycle import Lifecycle
from servelite.frontend.preparation import Preparation, answer_tokens
from servelite.frontend.sampling import Sampling
from servelite.ipc.messages import Ready
from servelite.observability.metrics import Metrics
from servelite.tokenizer.detokenizer import Detokenizer
from servelite.tokenizer.model_files import ModelFiles
from servelite.tokenizer.tokenizer import Tokenizer


class Service:
    """The parts of a front end, and the way of a request through them. Lives on one event loop."""

    def __init__(
        self,
        settings: Settings,
        client: int,
        slots: npt.NDArray[np.int64],
        files: ModelFiles,
        tokenizer: Tokenizer,
        threads: int,
    ) -> None:
        self.names = settings.served_model_name or (settings.model,)
        self.created = int(time.time())
        self.metrics = Metrics()
        self.lifecycle = Lifecycle()
        self._admission = Admission(slots, client, settings.max_num_seqs, settings.max_waiting_requests)
        self.engine = EngineClient(client, self.metrics, self._admission.retry_after)
        self._preparation = Preparation(files, tokenizer, threads)
        self._tokenizer = tokenizer

    @property
    def facts(self) -> Ready:
        """What the engine told of itself; raises `APIError` (503) before it did."""
        if self.engine.facts is None:
            self.lifecycle.check()
            raise RuntimeError("the service was opened before its engine was ready")
        return self.engine.facts

    def check_model(self, name: str) -> None:
        """Raises `APIError` (404) unless `name` is one this server goes by."""
        if name not in self.names:
            raise APIError(
                404,
                f"The model {name[:100]!r} does not exist; this server has: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    async def chat(self, messages: list[dict[str, str]], sampling: Sampling) -> Answer:
        """Start the assistant's answer to a conversation; raises `APIError`."""
        place = self._enter()
        try:
            return self._start(await self._preparation.chat(messages), sampling, place, "messages")
        except BaseException:
            place.leave()
            raise

    async def complete(self, prompt: str | list[int], sampling: Sampling) -> Answer:
        """Start the continuation of a prompt; raises `APIError`."""
        place = self._enter()
        try:
            return self._start(await self._preparation.completion(prompt), sampling, place, "prompt")
        except BaseException:
            place.leave()
            raise

    def close(self) -> None:
        """Free the threads."""
        self._preparation.close()

    def _enter(self) -> Place:
        self.lifecycle.check()
        return self._admission.enter()

    def _start(self, prompt_ids: list[int], sampling: Sampling, place: Place, param: str) -> Answer:
        self.lifecycle.check()  # again: preparing took its time
        max_tokens = answer_tokens(len(prompt_ids), sampling.max_tokens, self.facts.max_model_len, param)
        params = sampling.params(max_tokens, self._tokenizer.eos_token_ids)
        detokenizer = Detokenizer(self._tokenizer, stop=sampling.stop)
        record = self.engine.submit(prompt_ids, params, sampling.seed_bits(), place)
        return Answer(self.engine, record, detokenizer)
