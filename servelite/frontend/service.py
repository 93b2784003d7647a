"""One model served by one engine: from a validated request to its `Answer`s. No HTTP here.

The front end process puts HTTP around it, `LLM` a thread.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from servelite.config import Settings
from servelite.frontend.admission import Admission, Place
from servelite.frontend.answer import Answer
from servelite.frontend.engine_client import EngineClient
from servelite.frontend.errors import APIError, bad_request, deadline_exceeded
from servelite.frontend.lifecycle import Lifecycle
from servelite.frontend.model_metadata import ModelMetadata
from servelite.frontend.preparation import Caching, Preparation, Prepared, PreparedPrompt, answer_tokens
from servelite.frontend.prompts import Message, Prompt
from servelite.frontend.protocol import BodyRules, RequestOptions, TemplateOptions
from servelite.frontend.sampling import Sampling
from servelite.ipc.messages import Add, Ready, SamplingParams
from servelite.observability.metrics import Metrics

log = logging.getLogger(__name__)

PLAIN_TEMPLATE: Final = TemplateOptions()
PLAIN_OPTIONS: Final = RequestOptions()
_MAX_WARNED: Final = 1000  # unknown fields whose names are remembered, so that each is logged once


class Service:
    """The parts of a front end, and the way of a request through them. Lives on one event loop."""

    def __init__(
        self,
        settings: Settings,
        client: int,
        slots: npt.NDArray[np.int64],
        metadata: ModelMetadata,
        threads: int,
    ) -> None:
        """Raises `InvalidTemplate`: the model's chat template is no valid Jinja."""
        self.settings = settings
        self.names = settings.served_model_name or (settings.model,)
        self.created = int(time.time())
        self.metrics = Metrics()
        self.lifecycle = Lifecycle()
        self.tokenizer = metadata.tokenizer
        self.rules = BodyRules(
            metadata.sampling_defaults,
            *((self._warn_unknown,) if settings.unknown_fields == "warn" else ()),
        )
        self.preparation = Preparation(metadata.files, metadata.tokenizer, threads)
        self._warned: set[str] = set()
        self._client = client
        self._admission = Admission(slots, client, settings.max_num_seqs, settings.max_waiting_requests)
        self.engine = EngineClient(client, self.metrics, self._admission.retry_after)

    @property
    def facts(self) -> Ready:
        """What the engine told of itself; raises `APIError` (503) before it did."""
        if self.engine.facts is None:
            self.lifecycle.check()
            raise RuntimeError("the service was opened before its engine was ready")
        return self.engine.facts

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """What the model's generation_config.json sets in place of the declared defaults."""
        return self.rules.defaults

    def check_model(self, name: str) -> None:
        """Raises `APIError` (404) unless `name` is one this server goes by."""
        if name not in self.names:
            raise APIError(
                404,
                f"The model {name[:100]!r} does not exist; this server has: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    async def chat(
        self,
        messages: list[Message],
        sampling: Sampling,
        options: RequestOptions = PLAIN_OPTIONS,
        template: TemplateOptions = PLAIN_TEMPLATE,
    ) -> list[Answer]:
        """Start the `n` answers to a conversation; raises `APIError`."""
        return await self._begin(
            options.n,
            lambda caching: self.preparation.chat(
                messages, template, sampling, caching, self.facts.max_model_len
            ),
            sampling,
            options,
            "messages",
        )

    async def complete(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        options: RequestOptions = PLAIN_OPTIONS,
        *,
        echo: bool = False,
    ) -> list[Answer]:
        """Start the `n` continuations of each prompt, prompt by prompt; raises `APIError`."""
        return await self._begin(
            options.n * len(prompts),
            lambda caching: self.preparation.completion(
                prompts, sampling, caching, self.facts.max_model_len, echo=echo
            ),
            sampling,
            options,
            "prompt",
        )

    def close(self) -> None:
        """Free the threads."""
        self.preparation.close()

    async def _begin(
        self,
        count: int,
        prepare: Callable[[Caching], Awaitable[Prepared]],
        sampling: Sampling,
        options: RequestOptions,
        param: str,
    ) -> list[Answer]:
        arrived = time.monotonic()
        self.lifecycle.check()
        self._check_options(options)
        places = self._admission.enter(count)
        try:
            caching = Caching(
                self.facts.block_size if self.settings.enable_prefix_caching else 0, options.cache_salt
            )
            prepared = await prepare(caching)
            self.lifecycle.check()  # again: preparing took its time
            return self._submit(prepared, sampling, options, places, param, arrived)
        except BaseException:
            for place in places:
                place.leave()
            raise

    def _check_options(self, options: RequestOptions) -> None:
        """Raises `APIError` (400) for what this server's settings or its engine do not allow."""
        limit = self.settings.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(options, name)
            if asked > limit:
                raise bad_request(f"{name} is {asked}; this server's --max-logprobs is {limit}", name)
            if asked >= 0 and "logprobs" not in self.facts.features:
                raise bad_request(f"{name}: this engine gives no log probabilities", name)
        if options.priority and self.settings.scheduling_policy != "priority":
            raise bad_request(
                f"priority is {options.priority}; it has no effect without --scheduling-policy priority",
                "priority",
                "unsupported_value",
            )

    def _submit(
        self,
        prepared: Prepared,
        sampling: Sampling,
        options: RequestOptions,
        places: list[Place],
        param: str,
        arrived: float,
    ) -> list[Answer]:
        """All Adds of a request, once it is known that each of them can be made.

        The deadline is the first one's: once that runs, the request has begun.
        """
        self._check_waiting_tokens(prepared, param)
        parameters = [self._params(prompt, prepared, sampling, options, param) for prompt in prepared.prompts]
        deadline_ms = options.deadline_ms
        if deadline_ms >= 0:
            deadline_ms -= int((time.monotonic() - arrived) * 1000)
            if deadline_ms < 0:
                raise deadline_exceeded(options.deadline_ms)
        answers: list[Answer] = []
        free = iter(places)
        for prompt, params in zip(prepared.prompts, parameters, strict=True):
            leader = -1
            for choice in range(options.n):
                number = self.engine.new_number()
                if choice == 0:
                    seed = self._seed(sampling, number)
                add = Add(
                    request=number,
                    prompt=prompt.tokens,
                    sampling=params,
                    seed=seed,
                    choice=choice,
                    block_hashes=prompt.block_hashes,
                    cache_salt=options.cache_salt,
                    priority=options.priority,
                    deadline_ms=-1 if answers else deadline_ms,
                    prefix_of=leader,
                )
                record = self.engine.submit(add, next(free))
                answers.append(Answer(self.engine, record, self.tokenizer, sampling, prompt.text))
                leader = number if choice == 0 else leader
        return answers

    def _check_waiting_tokens(self, prepared: Prepared, param: str) -> None:
        """Raises `APIError` (400) for prompts that could not wait together even if nobody else did."""
        tokens, limit = (
            sum(prompt.num_tokens for prompt in prepared.prompts),
            self.settings.max_waiting_tokens,
        )
        if len(prepared.prompts) > 1 and tokens > limit:
            raise bad_request(
                f"The prompts have {tokens} tokens together; this server lets at most {limit} wait at once "
                "(--max-waiting-tokens): send fewer prompts in a request",
                param,
                "too_many_prompt_tokens",
            )

    def _params(
        self,
        prompt: PreparedPrompt,
        prepared: Prepared,
        sampling: Sampling,
        options: RequestOptions,
        param: str,
    ) -> SamplingParams:
        max_tokens = answer_tokens(
            prompt.num_tokens, sampling.max_tokens, self.facts.max_model_len, param, options.length_field
        )
        return sampling.params(
            max_tokens,
            self.tokenizer.eos_token_ids,
            prepared.bad_words,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
        )

    def _seed(self, sampling: Sampling, number: int) -> int:
        """The seed's 64 bits: the client's; else from `--seed` and the number of the request; else fresh."""
        if sampling.seed is not None:
            return sampling.seed & ((1 << 64) - 1)
        if self.settings.seed < 0:
            return secrets.randbits(64)
        text = f"{self.settings.seed} {self._client} {number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def _warn_unknown(self, name: str) -> None:
        """What becomes of an unknown field under `--unknown-fields warn`: one line in the log."""
        name = name[:60]
        if name not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(name)
            log.warning("a request has the unknown field %r: it is ignored", name)
