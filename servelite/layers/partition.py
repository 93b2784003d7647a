"""What each tensor-parallel rank holds of a layer, and by how many ranks a model can be divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from servelite.config import SettingError

MOST_RANKS: Final = 64
"""What --tp allows."""


@dataclass(frozen=True)
class Share:
    """A rank's part of a dimension that has `whole` places: `size` of them, from `start` on."""

    start: int
    size: int
    whole: int

    def times(self, width: int) -> Share:
        """The same share where each place is `width` places wide: of heads, say, their features."""
        return Share(self.start * width, self.size * width, self.whole * width)


def all_of(whole: int) -> Share:
    """One rank's share of what is not divided."""
    return Share(0, whole, whole)


def equal_share(whole: int, rank: int, ranks: int) -> Share:
    """Of heads, and of the features within a feed-forward part; `check_ranks` has seen that it comes out."""
    size, rest = divmod(whole, ranks)
    assert not rest, f"{whole} cannot be divided by {ranks} ranks"
    return Share(rank * size, size, whole)


def kv_head_share(kv_heads: int, rank: int, ranks: int) -> Share:
    """KV heads, divided like the query heads that read them; fewer than ranks: one each, held by several."""
    if kv_heads >= ranks:
        return equal_share(kv_heads, rank, ranks)
    assert ranks % kv_heads == 0, f"{kv_heads} KV heads cannot be spread over {ranks} ranks"
    return Share(rank * kv_heads // ranks, 1, kv_heads)


def vocabulary_share(vocab_size: int, rank: int, ranks: int) -> Share:
    """Equally many tokens each, but for the last rank, which has what is left."""
    size = -(-vocab_size // ranks)
    start = rank * size
    return Share(start, min(size, vocab_size - start), vocab_size)


def check_ranks(ranks: int, heads: int, kv_heads: int, vocab_size: int, inner: Mapping[str, int]) -> None:
    """
    Args:
        ranks: as --tp has it.
        inner: the intermediate sizes of the model's feed-forward parts, by the config's names of them.

    Raises:
        SettingError: the model cannot be divided by so many ranks; the text has the numbers.
    """
    reason = _misfit(ranks, heads, kv_heads, vocab_size, inner)
    if not reason:
        return
    fitting = [str(n) for n in range(1, MOST_RANKS + 1) if not _misfit(n, heads, kv_heads, vocab_size, inner)]
    listed = " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
    raise SettingError(f"--tp is {ranks}, {reason}; it can be {listed}")


def _misfit(ranks: int, heads: int, kv_heads: int, vocab_size: int, inner: Mapping[str, int]) -> str:
    """Why so many ranks will not do; "" where they will."""
    for field, value in {"num_attention_heads": heads, **inner}.items():
        if value % ranks:
            return f"which does not divide the model's {field} {value}"
    if kv_heads % ranks and ranks % kv_heads:
        return f"neither a divisor nor a multiple of the model's num_key_value_heads {kv_heads}"
    if vocabulary_share(vocab_size, ranks - 1, ranks).size < 1:
        return f"which leaves ranks without a token of the model's vocab_size {vocab_size}"
    return ""
