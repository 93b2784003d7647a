"""One model served by one engine: from a validated request to its `Answer`s. No HTTP here.

The front end process puts HTTP around it, `LLM` a thread.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from servelite.config import Settings
from servelite.frontend import thinking
from servelite.frontend.admission import Admission, Place
from servelite.frontend.answer import Answer
from servelite.frontend.engine_client import EngineClient
from servelite.frontend.errors import APIError, bad_request, deadline_exceeded
from servelite.frontend.fields import refuse_unknown
from servelite.frontend.forced_calls import chat_grammar, functions_of
from servelite.frontend.lifecycle import Lifecycle
from servelite.frontend.model_metadata import ModelMetadata
from servelite.frontend.parsers.formats import Begin, ChatFormats
from servelite.frontend.parsers.parser import AnswerParser
from servelite.frontend.pooled import Pooled
from servelite.frontend.preparation import Caching, Preparation, Prepared, PreparedPrompt, answer_tokens
from servelite.frontend.prompts import Message, Prompt, numbered
from servelite.frontend.protocol import BodyRules, RequestOptions, TemplateOptions
from servelite.frontend.sampling import Sampling
from servelite.frontend.thinking import thinking_limit, thinking_tokens
from servelite.frontend.tools import NO_TOOLS, ToolUse
from servelite.ipc.messages import Add, Kind, Pooling, Ready, SamplingParams
from servelite.observability.metrics import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """How an answer's calls and reasoning are read."""

    tools: ToolUse = NO_TOOLS
    include_reasoning: bool = True
    thinking_token_budget: int | None = None


PLAIN_TEMPLATE: Final = TemplateOptions()
PLAIN_OPTIONS: Final = RequestOptions()
_INDEX: Final = re.compile(r"\[\d+\]")  # of a list, in a field's path
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
        self.metrics = Metrics(self.names[0])
        self.lifecycle = Lifecycle()
        self.tokenizer = metadata.tokenizer
        self.formats = ChatFormats.choose(
            settings.tool_call_parser, settings.reasoning_parser, metadata.files.chat_template or ""
        )
        self._thinking_tokens = thinking_tokens(self.formats.reasoning, self.tokenizer.added_id)
        self.rules = BodyRules(
            metadata.sampling_defaults,
            self._warn_unknown if settings.unknown_fields == "warn" else refuse_unknown,
            limits_thinking=self._thinking_tokens is not None,
        )
        # By whether calls are looked for: the control tokens that the parser has to see.
        self._markers = [
            self.tokenizer.special_ids_in(self.formats.markers(tools=tools)) for tools in (False, True)
        ]
        self.preparation = Preparation(
            metadata.files,
            metadata.tokenizer,
            threads,
            formats=self.formats,
            parse_special=settings.allow_special_tokens_in_text,
            unknown=self._warn_unknown if settings.unknown_fields == "warn" else None,
        )
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
        reading: Reading | None = None,
    ) -> list[Answer]:
        """Start the `n` answers to a conversation; raises `APIError`.

        Args:
            reading: how calls and reasoning are read; None: the answers are plain text.
        """
        if reading is not None and reading.tools.wanted and self.formats.tools is None:
            raise bad_request(
                "tools: this server looks for no calls (--tool-call-parser none)",
                "tools",
                "unsupported_value",
            )
        return await self._begin(
            options.n,
            lambda caching: self.preparation.chat(
                messages,
                template,
                sampling,
                caching,
                self.facts.max_model_len,
                truncate=options.truncate,
            ),
            sampling,
            options,
            "messages",
            reading,
        )

    async def complete(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        options: RequestOptions = PLAIN_OPTIONS,
        *,
        echo: bool = False,
        add_special_tokens: bool = True,
    ) -> list[Answer]:
        """Start the `n` continuations of each prompt, prompt by prompt; raises `APIError`."""
        return await self._begin(
            options.n * len(prompts),
            lambda caching: self.preparation.completion(
                prompts,
                sampling,
                caching,
                self.facts.max_model_len,
                echo=echo,
                add_special_tokens=add_special_tokens,
                truncate=options.truncate,
            ),
            sampling,
            options,
            "prompt",
        )

    def pooling(self) -> Pooling:
        """How the engine makes vectors; raises `APIError` (400) where it makes none."""
        if self.facts.pooling is None:
            raise bad_request("This engine makes no embeddings.", "model", "unsupported_value")
        return self.facts.pooling

    async def embed(
        self, inputs: list[Prompt], options: RequestOptions, *, add_special_tokens: bool
    ) -> Pooled:
        """Start the vectors of `inputs`; raises `APIError`."""
        arrived = time.monotonic()
        self.lifecycle.check()
        self._check_options(options)
        # Twice what runs at once: the next ones are at the engine when the first ones end.
        places = self._admission.enter(
            min(len(inputs), 2 * self.settings.max_num_seqs, self._admission.limit)
        )
        try:
            with self._admission.preparing(len(places)):
                prompts = await self.preparation.embedding(
                    inputs,
                    self._caching(options),
                    self.facts.max_model_len,
                    add_special_tokens=add_special_tokens,
                    truncate=options.truncate,
                )
            self.lifecycle.check()  # again: preparing took its time
            deadline_ms = _time_left(options, arrived)
        except BaseException:
            for place in places:
                place.leave()
            raise
        adds = [
            Add(
                request=self.engine.new_number(),
                prompt=prompt.tokens,
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                seed=0,
                kind=Kind.POOL,
                block_hashes=prompt.block_hashes,
                cache_salt=options.cache_salt,
                priority=options.priority,
                deadline_ms=-1 if at else deadline_ms,
            )
            for at, prompt in enumerate(prompts)
        ]
        return Pooled(self.engine, self.lifecycle, adds, places, self.settings.max_waiting_tokens)

    def _caching(self, options: RequestOptions) -> Caching:
        cached = self.settings.enable_prefix_caching and not self.facts.encoder
        return Caching(self.facts.block_size if cached else 0, options.cache_salt)

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
        reading: Reading | None = None,
    ) -> list[Answer]:
        arrived = time.monotonic()
        self.lifecycle.check()
        if self.facts.encoder:
            raise bad_request(
                "This model is an encoder: it writes no text, and serves /v1/embeddings only.",
                "model",
                "unsupported_value",
            )
        self._check_options(options)
        places = self._admission.enter(count)
        try:
            with self._admission.preparing(count):
                caching = self._caching(options)
                grammar = await self._check_grammar(sampling, options)
                prepared = await prepare(caching)
                if reading is not None:
                    grammar = await self._chat_grammar(grammar, sampling, options, reading, prepared.begin)
            self.lifecycle.check()  # again: preparing took its time
            return self._submit(prepared, sampling, options, places, param, arrived, reading, grammar)
        except BaseException:
            for place in places:
                place.leave()
            raise

    async def _check_grammar(self, sampling: Sampling, options: RequestOptions) -> str:
        """What the answers follow, "" for nothing; raises `APIError` (400) where that cannot be."""
        grammar, field = options.grammar, options.grammar_field
        if not grammar:
            grammar, field = sampling.structured_outputs or "", "structured_outputs"
        if grammar:
            if "grammar" not in self.facts.features:
                raise bad_request(f"{field}: this engine follows no grammar", field)
            return await self.preparation.check_grammar(grammar, field)
        return grammar

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

    async def _chat_grammar(
        self, grammar: str, sampling: Sampling, options: RequestOptions, reading: Reading, begin: Begin
    ) -> str:
        """What a chat's answers follow: calls, where these are forced or `grammar` leaves room for no other,
        or `grammar`; from where the reasoning ends, which may have to come after so many tokens."""
        use, limit = reading.tools, None
        if reading.thinking_token_budget is not None and begin is not Begin.AFTER:
            limit = thinking_limit(reading.thinking_token_budget, self._thinking_tokens)
        other = options.grammar_field if options.grammar else "structured_outputs"
        if use.forced and grammar and other != "response_format":
            text = f"tool_choice asks for a call, and {other} for another answer: give one of them"
            raise bad_request(text, "tool_choice")
        if not use.forced and (not grammar or not (use.wanted or self.formats.reasoning)) and limit is None:
            return grammar
        if "grammar" not in self.facts.features:
            field = "tool_choice" if use.forced else thinking.FIELD
            raise bad_request(f"{field}: this engine follows no grammar", field)
        if limit is not None and not grammar and not use.forced:
            return limit.grammar(begin)
        functions = []
        for function in functions_of(use) if use.wanted else ():
            checked = await self.preparation.check_grammar(function.grammar, function.place)
            functions.append(function.following(checked))
        return await self.preparation.check_made(
            lambda: chat_grammar(
                functions,
                "" if use.forced else grammar,
                self.formats,
                self.tokenizer.split_controls,
                parallel=use.parallel,
                begin=begin,
                limit=limit,
            ),
            "tools" if functions else other,
        )

    def _submit(
        self,
        prepared: Prepared,
        sampling: Sampling,
        options: RequestOptions,
        places: list[Place],
        param: str,
        arrived: float,
        reading: Reading | None,
        grammar: str,
    ) -> list[Answer]:
        """All Adds of a request, once it is known that each of them can be made.

        The deadline is the first one's: once that runs, the request has begun.
        """
        self._check_waiting_tokens(prepared, param)
        count = len(prepared.prompts)
        parameters = [
            self._params(prompt, prepared, sampling, options, numbered(param, i, count))
            for i, prompt in enumerate(prepared.prompts)
        ]
        deadline_ms = _time_left(options, arrived)
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
                    grammar=grammar,
                    priority=options.priority,
                    deadline_ms=-1 if answers else deadline_ms,
                    prefix_of=leader,
                )
                record = self.engine.submit(add, next(free))
                answers.append(
                    Answer(
                        self.engine,
                        record,
                        self.tokenizer,
                        sampling,
                        prompt.text,
                        self._parser(reading, prepared.begin),
                        self._markers[reading is not None and reading.tools.wanted],
                        None if self._thinking_tokens is None else self._thinking_tokens.closing,
                    )
                )
                leader = number if choice == 0 else leader
        return answers

    def _parser(self, reading: Reading | None, begin: Begin) -> AnswerParser | None:
        """An answer's parser, where there is anything to look for."""
        if reading is None:
            return None
        calls, reasoning = self.formats.tools if reading.tools.wanted else None, self.formats.reasoning
        if calls is None and reasoning is None:
            return None
        return AnswerParser(
            calls,
            reasoning,
            reading.tools.call_rules,
            opened=begin is Begin.INSIDE,
            include_reasoning=reading.include_reasoning,
        )

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

    def _warn_unknown(self, path: str) -> None:
        """What becomes of an unknown field under `--unknown-fields warn`: one line in the log, wherever in
        a list it is."""
        name = _INDEX.sub("[]", path)
        if name not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(name)
            log.warning("a request has the unknown field %r: it is ignored", path)


def _time_left(options: RequestOptions, arrived: float) -> int:
    """Of the request's deadline, in ms, -1 where it has none; raises `APIError` (503) once it has passed."""
    left = options.deadline_ms
    if left >= 0:
        left -= int((time.monotonic() - arrived) * 1000)
        if left < 0:
            raise deadline_exceeded(options.deadline_ms)
    return left
