"""The sampling fields that chat, completions and `LLM` share, and what the engine is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from servelite.frontend.errors import bad_request
from servelite.frontend.fields import Boolean, Custom, Field, Integer, Number, Strings, TokenBias, TokenIDs
from servelite.frontend.grammars import STRUCTURED_OUTPUTS_SCHEMA, read_structured_outputs
from servelite.ipc.messages import SamplingParams

MAX_TOKENS: Final = 1 << 24
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_LISTED_TOKENS: Final = 1 << 18  # a whole vocabulary

SAMPLING_FIELDS: Final = (
    Field("temperature", Number(0, 2), 1.0, "spread of the draw; 0 always takes the likeliest token"),
    Field("top_p", Number(0, 1, above_low=True), 1.0, "draw from the likeliest tokens that add up to this"),
    Field("top_k", Integer(-1, 1 << 24), 0, "draw from this many likeliest tokens; 0 or -1: all"),
    Field("min_p", Number(0, 1), 0.0, "draw from tokens at least this share as likely as the likeliest"),
    Field("presence_penalty", Number(-2, 2), 0.0, "taken from the logit of each token the answer has"),
    Field("frequency_penalty", Number(-2, 2), 0.0, "the same, for each time the answer has it"),
    Field(
        "repetition_penalty",
        Number(0, 1000, above_low=True),
        1.0,
        "factor against tokens that prompt or answer have; above 1 discourages",
    ),
    Field("logit_bias", TokenBias(1024, -100, 100), (), "added to the logits of given tokens"),
    Field("allowed_token_ids", TokenIDs(MAX_LISTED_TOKENS, 1), (), "draw from these tokens only"),
    Field("bad_words", Strings(128, 256), (), "texts that are not written, with or without a space before"),
    Field("seed", Integer(-(1 << 63), (1 << 63) - 1), None, "same seed, same answer; absent: a random one"),
    Field("stop", Strings(MAX_STOPS, MAX_STOP_CHARS), (), "texts that end the answer, themselves left out"),
    Field("include_stop_str_in_output", Boolean(), False, "leave the text or token that ended it in"),
    Field("stop_token_ids", TokenIDs(1024), (), "tokens that end the answer"),
    Field("ignore_eos", Boolean(), False, "do not end at the model's end-of-text tokens"),
    Field("min_tokens", Integer(0, MAX_TOKENS), 0, "no end, by token or by `stop`, before this many tokens"),
    Field("skip_special_tokens", Boolean(), True, "leave control tokens out of the text"),
    Field(
        "structured_outputs",
        Custom(
            read_structured_outputs,
            "object with one of json, regex, choice, grammar",
            STRUCTURED_OUTPUTS_SCHEMA,
        ),
        None,
        "what the answer follows: a JSON Schema, a regular expression, one of several texts, a grammar",
    ),
)

GENERATION_CONFIG_NAMES: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling defaults that a model's generation_config.json may set."""


@dataclass(frozen=True)
class Sampling:
    """How one answer is drawn and when it ends, as a client asked for it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    structured_outputs: Any = None  # an object as a client gives it, or the grammar read from it
    max_tokens: int | None = None

    @classmethod
    def from_fields(cls, values: Mapping[str, Any], max_tokens: int | None) -> Sampling:
        """From the values of SAMPLING_FIELDS that were read from a body."""
        sampling = cls(**{f.name: values[f.name] for f in SAMPLING_FIELDS}, max_tokens=max_tokens)
        if max_tokens is not None and sampling.min_tokens > max_tokens:
            raise _too_few(sampling.min_tokens, max_tokens)
        return sampling

    def check_tokens(self, vocab_size: int) -> None:
        """Raises `APIError` (400) for a token ID that the vocabulary does not have."""
        for name, ids in (
            ("logit_bias", [index for index, _ in self.logit_bias]),
            ("allowed_token_ids", self.allowed_token_ids),
            ("stop_token_ids", self.stop_token_ids),
        ):
            if (largest := max(ids, default=0)) >= vocab_size:
                raise bad_request(f"{name} has {largest}; token IDs go from 0 to {vocab_size - 1}", name)

    def params(
        self,
        max_tokens: int,
        eos_token_ids: tuple[int, ...],
        bad_words: tuple[tuple[int, ...], ...] = (),
        *,
        logprobs: int = -1,
        prompt_logprobs: int = -1,
    ) -> SamplingParams:
        """What the engine is told.

        Args:
            max_tokens: what the context leaves, or fewer. 0: the engine's step for the prompt's last token
                gives one all the same, which `Answer` drops.
            bad_words: the token IDs of `self.bad_words`.

        Raises:
            APIError: 400; `min_tokens` is more than that.
        """
        if self.min_tokens > max_tokens:
            raise _too_few(self.min_tokens, max_tokens)
        eos = () if self.ignore_eos else eos_token_ids
        stops = tuple(dict.fromkeys(eos + self.stop_token_ids)) if max_tokens else ()
        if self.min_tokens and self.allowed_token_ids and set(stops).issuperset(self.allowed_token_ids):
            raise bad_request(
                f"allowed_token_ids has stop tokens only, which min_tokens {self.min_tokens} forbids",
                "allowed_token_ids",
            )
        return SamplingParams(
            max_tokens=max(max_tokens, 1),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            stop_token_ids=stops,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=bad_words,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _too_few(min_tokens: int, max_tokens: int) -> Exception:
    text = f"min_tokens is {min_tokens}, more than the {max_tokens} tokens that the answer may have"
    return bad_request(text, "min_tokens")
