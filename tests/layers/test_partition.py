"""Which part of a layer each rank has, and which numbers of ranks a model can be divided by."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelite.config import SettingError, Settings
from servelite.layers.partition import (
    MOST_RANKS,
    Share,
    all_of,
    check_ranks,
    equal_share,
    kv_head_share,
    vocabulary_share,
)


def test_equal_shares_follow_one_another() -> None:
    assert [equal_share(12, rank, 3) for rank in range(3)] == [
        Share(0, 4, 12),
        Share(4, 4, 12),
        Share(8, 4, 12),
    ]
    assert equal_share(7, 0, 1) == all_of(7) == Share(0, 7, 7)
    assert equal_share(12, 1, 3).times(5) == Share(20, 20, 60)
    with pytest.raises(AssertionError):
        equal_share(7, 0, 2)


def test_kv_heads_are_divided_or_where_they_are_fewer_than_ranks_replicated() -> None:
    assert [kv_head_share(4, rank, 2) for rank in range(2)] == [Share(0, 2, 4), Share(2, 2, 4)]
    assert [kv_head_share(2, rank, 2) for rank in range(2)] == [Share(0, 1, 2), Share(1, 1, 2)]
    assert [kv_head_share(2, rank, 6).start for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [kv_head_share(1, rank, 4) for rank in range(4)] == [Share(0, 1, 1)] * 4
    with pytest.raises(AssertionError):
        kv_head_share(2, 0, 3)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 16))
def test_a_rank_has_the_kv_heads_that_its_query_heads_read(kv_heads: int, group: int, ranks: int) -> None:
    """Query head h of the model reads KV head h // group; of the rank, in the same way, its own."""
    heads = kv_heads * group
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return
    for rank in range(ranks):
        queries, keys = equal_share(heads, rank, ranks), kv_head_share(kv_heads, rank, ranks)
        assert queries.size % keys.size == 0
        for own in range(queries.size):
            read = keys.start + own // (queries.size // keys.size)
            assert read == (queries.start + own) // group


def test_the_last_rank_has_what_is_left_of_the_vocabulary() -> None:
    assert [vocabulary_share(257, rank, 4) for rank in range(4)] == [
        Share(0, 65, 257),
        Share(65, 65, 257),
        Share(130, 65, 257),
        Share(195, 62, 257),
    ]
    assert vocabulary_share(49152, 2, 3) == Share(32768, 16384, 49152)
    assert vocabulary_share(10, 0, 1) == all_of(10)


def refusal(
    ranks: int, heads: int = 8, kv_heads: int = 8, vocab_size: int = 1000, inner: int = 64, **more: int
) -> str:
    sizes = {"intermediate_size": inner, **more}
    try:
        check_ranks(ranks, heads, kv_heads, vocab_size, sizes)
    except SettingError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("ranks", "shape", "text"),
    [
        (
            2,
            {"heads": 9, "kv_heads": 3, "inner": 1536 * 3},
            "--tp is 2, which does not divide the model's num_attention_heads 9; it can be 1, 3 or 9",
        ),
        (
            9,
            {"heads": 9, "kv_heads": 3, "inner": 1536},
            "--tp is 9, which does not divide the model's intermediate_size 1536; it can be 1 or 3",
        ),
        (
            4,
            {"heads": 12, "kv_heads": 6, "inner": 24},
            "--tp is 4, neither a divisor nor a multiple of the model's num_key_value_heads 6; "
            "it can be 1, 2, 3, 6 or 12",
        ),
        (
            4,
            {"moe_intermediate_size": 6},
            "--tp is 4, which does not divide the model's moe_intermediate_size 6; it can be 1 or 2",
        ),
        (
            8,
            {"vocab_size": 10},
            "--tp is 8, which leaves ranks without a token of the model's vocab_size 10; it can be 1, 2 or 4",
        ),
        (2, {"heads": 7, "inner": 6}, "--tp is 2, which does not divide the model's num_attention_heads 7; "
         "it can be 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused_with_the_numbers(
    ranks: int, shape: dict[str, int], text: str
) -> None:
    assert refusal(ranks, **shape) == text


def test_what_can_be_divided_is_not_refused() -> None:
    assert refusal(1, heads=9, kv_heads=3, inner=7) == ""
    assert refusal(3, heads=9, kv_heads=3, inner=1536, vocab_size=49152) == ""
    assert refusal(4, heads=8, kv_heads=1) == refusal(8, heads=8, kv_heads=2, vocab_size=257) == ""
    assert refusal(4, heads=4, kv_heads=4, vocab_size=10) == ""  # 3, 3, 3 and 1


def test_the_limit_is_that_of_the_setting() -> None:
    (tp,) = [field for field in dataclasses.fields(Settings) if field.name == "tp"]
    assert tp.metadata["high"] == MOST_RANKS
    wide = {"heads": 128, "kv_heads": 128, "inner": 128, "vocab_size": 128}
    assert refusal(3, **wide).endswith("it can be 1, 2, 4, 8, 16, 32 or 64")
