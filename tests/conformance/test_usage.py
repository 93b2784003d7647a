"""Usage: what the prefix cache gave is told alike in both modes, and is 0 on a miss."""

from __future__ import annotations

import secrets

from tests.conformance.setups import BLOCK_SIZE
from tests.conformance.target import COMPLETIONS, GREEDY, Target

WHOLE = 4 * BLOCK_SIZE


def fresh_ids(count: int, vocab: int = 20_000) -> list[int]:
    """Plain tokens that no prompt before had in this order; the first hundred IDs may be control tokens."""
    return [100 + secrets.randbelow(vocab - 100) for _ in range(count)]


def test_use_01_cached_tokens_in_both_modes(each: Target) -> None:
    """USE-01. A cache of single tokens may find two more; the last is computed in any case."""
    body = {"prompt": fresh_ids(WHOLE + 3), "max_tokens": 3} | GREEDY
    cold, warm = each.plain(COMPLETIONS, body), each.plain(COMPLETIONS, body)
    stream = each.stream(COMPLETIONS, body)
    assert cold.cached == 0 and warm.cached == stream.cached
    assert WHOLE <= warm.cached <= WHOLE + 2
    for answer in (cold, warm, stream):
        assert answer.counts["prompt_tokens"] == WHOLE + 3
        assert answer.text == cold.text
