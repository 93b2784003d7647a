"""The resident table takes plans in as a plain loop over rows would."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from servelite.ipc.messages import NewRow, Plan, SamplingParams, pack
from servelite.worker.resident import ResidentTable

ROWS, LENGTH, SIZE, GROUPS, VOCAB = 6, 64, 4, 2, 50


def new_row(row: int, tokens: list[int], *, num_computed: int = 0, seed: int = 0) -> NewRow:
    sampling = SamplingParams(max_tokens=8, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)
    return NewRow(row, 3, pack(tokens), len(tokens) - 1, num_computed, seed, 2, sampling)


def plan(rows: list[int], counts: list[list[int]], blocks: list[int], new: tuple[NewRow, ...] = ()) -> Plan:
    return Plan(
        epoch=0,
        step=0,
        rows=pack(rows),
        generations=pack([3] * len(rows)),
        num_tokens=pack([1] * len(rows)),
        num_drafts=b"",
        num_logits=pack([0] * len(rows)),
        block_counts=pack(np.array(counts).reshape(-1)),
        block_ids=pack(blocks),
        new_rows=new,
    )


def test_a_new_row_brings_all_its_columns() -> None:
    table = ResidentTable(ROWS, LENGTH, SIZE, GROUPS, VOCAB)
    seed = 2**64 - 5
    table.apply(plan([4], [[0], [0]], [], (new_row(4, [9, 8, 7], num_computed=1, seed=seed),)))
    assert table.tokens[4, :3].tolist() == [9, 8, 7]
    assert (table.generation[4], table.num_computed[4], table.prompt_len[4]) == (3, 1, 2)
    columns = (table.temperature, table.top_k, table.top_p, table.min_p, table.choice)
    assert [float(column[4]) for column in columns] == [0.5, 7, 0.25, 0.125, 2]
    assert int(table.seed.view(np.uint64)[4]) == seed


def test_a_row_taken_again_forgets_its_blocks() -> None:
    table = ResidentTable(ROWS, LENGTH, SIZE, 1, VOCAB)
    table.apply(plan([1], [[3]], [10, 11, 12], (new_row(1, [1] * 12),)))
    table.apply(plan([1], [[1]], [20], (new_row(1, [1] * 4),)))
    assert table.num_blocks[0, 1] == 1
    assert table.block_tables[0, 1, 0] == 20


def test_blocks_that_hold_computed_tokens_are_not_stale() -> None:
    """A prefix hit's blocks, and a copied block computed halfway, keep their content."""
    table = ResidentTable(ROWS, LENGTH, SIZE, 1, VOCAB)
    stale = table.apply(plan([2], [[4]], [5, 6, 7, 8], (new_row(2, [1] * 14, num_computed=10),)))
    assert stale.tolist() == [8]
    table.num_computed[2] = 16
    assert table.apply(plan([2], [[1]], [9])).tolist() == [9]


@given(st.data())
def test_tables_grow_as_a_loop_would_grow_them(data: st.DataObject) -> None:
    table = ResidentTable(ROWS, LENGTH, SIZE, GROUPS, VOCAB)
    expected: list[list[list[int]]] = [[[] for _ in range(ROWS)] for _ in range(GROUPS)]
    fresh = iter(range(10_000))
    for _ in range(data.draw(st.integers(1, 5))):
        rows = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(1, ROWS))]
        count = st.integers(0, 3)
        counts = [data.draw(st.lists(count, min_size=len(rows), max_size=len(rows))) for _ in range(GROUPS)]
        blocks = []
        for group, numbers in enumerate(counts):
            for row, number in zip(rows, numbers, strict=True):
                part = [next(fresh) for _ in range(number)]
                expected[group][row] += part
                blocks += part
        table.apply(plan(rows, counts, blocks))
        for group in range(GROUPS):
            for row in range(ROWS):
                number = table.num_blocks[group, row]
                assert table.block_tables[group, row, :number].tolist() == expected[group][row]
