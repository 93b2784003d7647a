"""What the engine refuses at an Add: what it could never serve, and what it has no room for.

Front ends refuse first, with better words; this is the last line, so that nothing a front end lets
through can stop the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from servelite.engine.grammars import bind
from servelite.engine.kv_cache import KVCacheManager
from servelite.engine.request import Request
from servelite.ipc.messages import TOKEN, Add, Kind, RequestError, RunnerFacts, unpack
from servelite.tokenizer.block_hashes import BLOCK_HASH_BYTES

_Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Admission:
    """The facts a request is held against."""

    facts: RunnerFacts
    kv: KVCacheManager
    in_flight: int  # tokens that steps in flight may hold: depth times the budget
    features: tuple[str, ...]  # what engine and runner can do beside sampling

    def request_of(self, client: int, add: Add, now: float) -> Request | RequestError:
        """The request behind an Add, or why it is refused."""
        if len(add.prompt) % TOKEN.itemsize or len(add.produced) % TOKEN.itemsize:
            return RequestError(400, "invalid_prompt", "the prompt is not a column of token IDs")
        full_blocks = len(add.prompt) // TOKEN.itemsize // self.kv.block_size
        if len(add.block_hashes) not in (0, full_blocks * BLOCK_HASH_BYTES):
            return RequestError(
                400, "invalid_prompt", "the block hashes are not those of the prompt's full blocks"
            )
        prompt, produced = unpack(add.prompt), unpack(add.produced)
        error = (
            self._unsupported(add)
            or self._bad_tokens(prompt, produced)
            or self._too_long(add, prompt, produced)
        )
        if error is not None:
            return error
        names, pooling = add.block_hashes, self.facts.pooling
        add, constraint = bind(add)
        return Request(
            names=[names[i : i + BLOCK_HASH_BYTES] for i in range(0, len(names), BLOCK_HASH_BYTES)],
            client=client,
            add=add,
            tokens=np.concatenate([prompt, produced]).astype(np.int32),
            prompt_len=len(prompt),
            arrived=now,
            deadline=now + add.deadline_ms / 1000 if add.deadline_ms >= 0 else None,
            constraint=constraint,
            reads_cache=pooling is None or add.kind is Kind.GENERATE or pooling.kind == "last",
        )

    def _unsupported(self, add: Add) -> RequestError | None:
        used = [name for name in ("adapter", "media") if getattr(add, name)]
        if add.grammar and ("grammar" not in self.features or add.kind is Kind.POOL):
            used.append("grammar")
        if "logprobs" not in self.features:
            used += [name for name in ("logprobs", "prompt_logprobs") if getattr(add.sampling, name) >= 0]
        if self.facts.encoder if add.kind is Kind.GENERATE else self.facts.pooling is None:
            used.append(add.kind.name.lower())
        if used:
            return RequestError(400, "unsupported", f"this engine does not support: {', '.join(used)}")
        return None

    def _bad_tokens(self, prompt: _Ints, produced: _Ints) -> RequestError | None:
        if not len(prompt):
            return RequestError(400, "invalid_prompt", "the prompt has no tokens")
        for column in (prompt, produced):
            wrong = column[(column < 0) | (column >= self.facts.vocab_size)]
            if len(wrong):
                text = f"token ID {wrong[0]} is outside the vocabulary of {self.facts.vocab_size} tokens"
                return RequestError(400, "invalid_prompt", text)
        return None

    def _too_long(self, add: Add, prompt: _Ints, produced: _Ints) -> RequestError | None:
        count, answer, longest = len(prompt), add.sampling.max_tokens, self.facts.max_model_len
        if answer < 1 or len(produced) >= answer:
            text = (
                f"max_tokens is {answer}; it must be at least 1 and above the {len(produced)} tokens produced"
            )
            return RequestError(400, "invalid_max_tokens", text)
        if add.kind is Kind.POOL and answer != 1:
            return RequestError(400, "invalid_max_tokens", f"max_tokens is {answer}; for a vector it is 1")
        if add.kind is Kind.POOL and count > longest:
            text = f"the prompt has {count} tokens, above the model's length of {longest}"
            return RequestError(400, "context_length_exceeded", text)
        if add.kind is Kind.GENERATE and count + answer > longest:
            text = (
                f"the prompt has {count} tokens and max_tokens is {answer}: together {count + answer}, "
                f"above the model's length of {longest}"
            )
            return RequestError(400, "context_length_exceeded", text)
        if not self.kv.fits(count + answer - 1, self.in_flight):
            blocks, there = self.kv.blocks_for(count + answer - 1, self.in_flight), self.kv.pool.num_blocks
            text = (
                f"the prompt has {count} tokens and max_tokens is {answer}: "
                f"together they need {blocks} KV blocks, above the {there} of the whole cache"
            )
            return RequestError(400, "context_length_exceeded", text)
        return None
