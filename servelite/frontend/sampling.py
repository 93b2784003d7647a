"""The sampling fields that chat, completions and `LLM` share, and what the engine is told of them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Final

from servelite.frontend.fields import Boolean, Field, Integer, Number, Strings
from servelite.ipc.messages import SamplingParams

MAX_TOKENS: Final = 1 << 24
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024

SAMPLING_FIELDS: Final = (
    Field("temperature", Number(0, 2), 1.0, "spread of the draw; 0 always takes the likeliest token"),
    Field("top_p", Number(0, 1, above_low=True), 1.0, "draw from the likeliest tokens that add up to this"),
    Field("top_k", Integer(-1, 1 << 24), 0, "draw from this many likeliest tokens; 0 or -1: all"),
    Field("seed", Integer(-(1 << 63), (1 << 64) - 1), None, "same seed, same answer; absent: a random one"),
    Field("stop", Strings(MAX_STOPS, MAX_STOP_CHARS), (), "texts that end the answer, themselves left out"),
    Field("ignore_eos", Boolean(), False, "do not end at the model's end-of-text tokens"),
)


@dataclass(frozen=True)
class Sampling:
    """How one answer is drawn and when it ends, as a client asked for it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None

    @classmethod
    def from_fields(cls, values: dict[str, Any], max_tokens: int | None) -> Sampling:
        """From the values of SAMPLING_FIELDS that were read from a body."""
        return cls(**{f.name: values[f.name] for f in SAMPLING_FIELDS}, max_tokens=max_tokens)

    def params(self, max_tokens: int, eos_token_ids: tuple[int, ...]) -> SamplingParams:
        """What the engine is told; `max_tokens` is what the context leaves, or fewer."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            stop_token_ids=() if self.ignore_eos else eos_token_ids,
        )

    def seed_bits(self) -> int:
        """The seed's 64 bits, unsigned: the client's, or a fresh one."""
        return secrets.randbits(64) if self.seed is None else self.seed & ((1 << 64) - 1)
