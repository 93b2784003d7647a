"""The sampler against a float64 oracle, its distribution, and what a draw must not depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servelite.ipc.masks import unpack_bits
from servelite.ipc.messages import NewRow, Plan, SamplingParams, pack
from servelite.worker.resident import ResidentTable
from servelite.worker.sampler import SamplingRows, apply_masks, sample
from servelite.worker.step_inputs import sampling_rows
from tests.worker import sampler_oracle
from tests.worker.sampler_oracle import Row

MARGIN = 1e-4


def columns(rows: Sequence[Row]) -> SamplingRows:
    def column(name: str, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.array([getattr(row, name) for row in rows], dtype))

    seeds = np.array([row.seed for row in rows], np.uint64).view(np.int64)
    return SamplingRows(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int64),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seed=torch.from_numpy(seeds),
        choice=column("choice", np.int64),
        position=column("position", np.int64),
    )


def mask(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Apply the masks as the engine sends them: 32-bit words, little-endian, of the rows that have one."""
    masked = [place for place, row in enumerate(rows) if row.allowed is not None]
    bits = np.zeros((len(masked), -(-logits.shape[1] // 32) * 32), np.uint8)
    for line, place in zip(bits, masked, strict=True):
        line[list(rows[place].allowed or ())] = 1
    if masked:
        apply_masks(logits, torch.tensor(masked), np.packbits(bits, axis=1, bitorder="little"))
    return logits


def run(logits: npt.NDArray[np.float32], rows: Sequence[Row]) -> torch.Tensor:
    return sample(mask(torch.from_numpy(logits.copy()), rows), columns(rows))


def new_row(place: int, row: Row) -> NewRow:
    """The row as the engine would tell it to a worker."""
    tokens = row.prompt + row.output
    shared = set(SamplingParams.__struct_fields__) & {field.name for field in dataclasses.fields(row)}
    sampling = SamplingParams(max_tokens=99, **{name: getattr(row, name) for name in shared})
    return NewRow(place, 0, pack(tokens), len(row.prompt), len(tokens), row.seed, row.choice, sampling)


def seated(rows: Sequence[Row], vocab: int) -> ResidentTable:
    """A resident table with `rows` in its rows from 0 on, all their tokens computed."""
    table = ResidentTable(len(rows), 64, 16, 1, vocab)
    nothing = {"rows": b"", "generations": b"", "num_tokens": b"", "num_drafts": b"", "num_logits": b""}
    new_rows = tuple(new_row(place, row) for place, row in enumerate(rows))
    table.apply(Plan(0, 0, **nothing, block_counts=b"", block_ids=b"", new_rows=new_rows))
    return table


def run_whole(
    table: ResidentTable, places: Sequence[int], logits: npt.NDArray[np.float32], rows: Sequence[Row]
) -> torch.Tensor:
    """Every pass, from a resident table, as the runner does it."""
    at, values = np.array(places, np.int32), torch.from_numpy(logits.copy())
    table.processors.apply(values, at, table.tokens, table.num_known[at], table.prompt_len[at])
    return sample(mask(values, rows), sampling_rows(table, at))


def random_row(random: np.random.Generator, logits: npt.NDArray[np.float32]) -> Row:
    """Parameters that meet: the row's tokens, bias and masks are of the likelier ones."""
    vocab = len(logits)
    likely = np.argpartition(-logits, 30)[:30]

    def ids(most: int, least: int = 1) -> tuple[int, ...]:
        return tuple(int(i) for i in random.choice(likely, size=int(random.integers(least, most + 1))))

    def some(values: Sequence[float], default: float, chance: float = 0.3) -> float:
        return float(np.float32(random.choice(values))) if random.random() < chance else default

    prompt, output = ids(12), ids(20, least=0)
    tokens = prompt + output
    bad_words = [ids(3), tokens[-2:] + ids(1), tokens[-1:] + ids(1)][: int(some([1, 2, 3], 0))]
    allowed = None
    if random.random() < 0.15:
        count = min(vocab, int(random.integers(1, 40)))
        allowed = tuple(int(i) for i in random.choice(vocab, size=count, replace=False)) + ids(3, least=0)
    return Row(
        temperature=float(np.float32(random.choice([0.0, 0.05, 0.7, 1.0, 1.5, 20.0]))),
        top_k=int(random.choice([0, 0, 0, 1, 3, 50, 300, vocab, 10 * vocab])),
        top_p=float(np.float32(random.choice([1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999]))),
        min_p=float(np.float32(random.choice([0.0, 0.0, 0.0, 0.01, 0.2, 1.0]))),
        seed=int(random.integers(0, 2**64, dtype=np.uint64)),
        choice=int(random.integers(0, 4)),
        position=len(output),
        allowed=allowed,
        prompt=prompt,
        output=output,
        logit_bias=tuple((token, some([-100, -3.3, 2.5, 100], -0.7)) for token in set(ids(5, least=0)))
        if random.random() < 0.4
        else (),
        repetition_penalty=some([0.8, 1.1, 1.3, 2.0], 1.0),
        presence_penalty=some([-2.0, 0.5, 1.7], 0.0),
        frequency_penalty=some([-1.1, 0.3, 2.0], 0.0),
        allowed_token_ids=ids(30) if random.random() < 0.15 else (),
        min_tokens=int(some([3, 10, 40], 0, chance=0.5)),
        stop_token_ids=ids(6, least=0),
        bad_words=tuple(bad_words),
    )


def random_logits(random: np.random.Generator, rows: int, vocab: int) -> npt.NDArray[np.float32]:
    """Rows of different sharpness; a third are coarse, so that exact ties abound."""
    spread = random.choice([0.3, 3.0, 8.0], size=(rows, 1))
    logits = (random.normal(size=(rows, vocab)) * spread).astype(np.float32)
    coarse = random.random(rows) < 0.33
    logits[coarse] = np.round(logits[coarse] * 4) / 4
    return logits


ROWS = {257: 5600, 1000: 3400, 32000: 600, 49152: 300, 262144: 100}


def test_draws_of_ten_thousand_rows_equal_the_oracles() -> None:
    assert sum(ROWS.values()) == 10_000
    close = 0
    for vocab, count in ROWS.items():
        random, batch = np.random.default_rng(vocab), min(50, 2_000_000 // vocab)
        for begin in range(0, count, batch):
            logits = random_logits(random, min(batch, count - begin), vocab)
            rows = [random_row(random, line) for line in logits]
            tokens = run_whole(seated(rows, vocab), range(len(rows)), logits, rows)
            for line, row, token in zip(logits, rows, tokens.tolist(), strict=True):
                expected, margin = sampler_oracle.draw(line, row)
                if margin > MARGIN:
                    assert token == expected, (vocab, row)
                else:
                    close += 1
    print(f"{close} rows were too close to call")
    assert close < 10, f"{close} of 10,000 rows were too close to call"


NEUTRAL = Row()


PASSES = {field.name for field in dataclasses.fields(Row)} - {
    *("seed", "choice", "position", "prompt", "output", "stop_token_ids")
}


@pytest.mark.parametrize("field", sorted(PASSES))
def test_a_pass_left_out_would_be_found(field: str) -> None:
    """The rows above do use every parameter to effect: without it other tokens are drawn."""
    random = np.random.default_rng(4)
    logits = random_logits(random, 300, 257)
    rows = [random_row(random, line) for line in logits]
    without = [replace(row, **{field: getattr(NEUTRAL, field)}) for row in rows]
    tokens = run_whole(seated(without, 257), range(300), logits, without).tolist()
    found = [sampler_oracle.draw(line, row) for line, row in zip(logits, rows, strict=True)]
    differing = sum(m > MARGIN and t != token for (t, m), token in zip(found, tokens, strict=True))
    assert differing >= 4


def test_greedy_takes_the_lowest_of_tying_tokens() -> None:
    logits = np.zeros((3, 49152), np.float32)
    logits[0, [40000, 7, 31]] = 5
    logits[1, [49151, 49150]] = 5
    tokens = run(logits, [Row(temperature=0)] * 3)
    assert tokens.tolist() == [7, 49150, 0]


def test_a_nucleus_wider_than_the_first_look_is_exact() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(scale=0.1, size=(4, 20000)).astype(np.float32)
    rows = [Row(top_p=p, seed=i) for i, p in enumerate((0.02, 0.3, 0.9, 0.9999))]
    for line, row, token in zip(logits, rows, run(logits, rows).tolist(), strict=True):
        assert sampler_oracle.draw(line, row)[0] == token


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (Row(), range(6)),
        (Row(top_k=2), (0, 1)),
        (Row(top_p=0.74), (0, 1)),
        (Row(top_p=0.76), (0, 1, 2)),
        (Row(min_p=0.2), (0, 1, 2, 3)),
        (Row(top_k=4, top_p=0.8), (0, 1, 2)),
        (Row(temperature=0.5, top_p=0.72), (0,)),
        (Row(allowed=(1, 3, 5)), (1, 3, 5)),
        (Row(allowed=(3, 5), top_k=4), (3, 5)),
    ],
    ids=["all", "top-k", "top-p", "top-p, 3 stay", "min-p", "top-k and top-p", "cool", "mask", "mask, top-k"],
)
def test_a_hundred_thousand_draws_have_the_right_distribution(row: Row, kept: Sequence[int]) -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8 and two of nearly nothing; then cut and scaled."""
    p = np.array([0.5, 0.25, 0.125, 0.12, 0.004, 0.001])
    logits = np.log(p).astype(np.float32)
    expected = np.zeros(6)
    scaled = p ** (1 / row.temperature)
    expected[list(kept)] = scaled[list(kept)] / scaled[list(kept)].sum()
    count = 100_000
    rows = [
        Row(row.temperature, row.top_k, row.top_p, row.min_p, 99, 0, position, row.allowed)
        for position in range(count)
    ]
    tokens = run(np.tile(logits, (count, 1)), rows).numpy()
    seen = np.bincount(tokens, minlength=6)
    assert not seen[expected == 0].any()
    used = expected > 0
    chi_square = float((((seen - count * expected) ** 2)[used] / (count * expected)[used]).sum())
    # The 0.9999 quantiles of chi-square at 0 to 5 degrees of freedom; the draws are fixed by the seed.
    assert chi_square <= [1e-9, 15.1, 18.4, 21.1, 23.5, 25.7][used.sum() - 1]


@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_draw_does_not_depend_on_its_batch(data: st.DataObject, seed: int) -> None:
    random = np.random.default_rng(seed)
    vocab, count = 700, 12
    logits = random_logits(random, count, vocab)
    rows = [random_row(random, line) for line in logits]
    alone = [
        int(run_whole(seated([rows[i]], vocab), [0], logits[i : i + 1], [rows[i]])) for i in range(count)
    ]
    order = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20))
    together = run_whole(seated(rows, vocab), order, logits[order], [rows[i] for i in order])
    assert together.tolist() == [alone[i] for i in order]


@pytest.mark.parametrize("low", [-1.0, -8.0])
def test_the_lowest_of_tokens_that_tie_with_their_noise_wins(
    low: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 5 is the best by logit; 2, 3 and 9 reach 5's score by their noise alone."""

    def noise(tokens: npt.NDArray[np.int64], *_: object) -> npt.NDArray[np.float32]:
        return np.where(np.isin(tokens, [2, 3, 9]), -low, 0).astype(np.float32)

    monkeypatch.setattr("servelite.worker.sampler.gumbel_numpy", noise)
    logits = np.full((2, 12), -30, np.float32)
    logits[:, [2, 3, 9]] = low
    logits[:, 5] = 0
    logits[1, 2] = -30
    assert run(logits, [Row(), Row()]).tolist() == [2, 3]


def test_choices_of_one_seed_differ_and_repeat() -> None:
    logits = np.zeros((8, 49152), np.float32)
    rows = [Row(seed=5, choice=choice) for choice in range(8)]
    tokens = run(logits, rows).tolist()
    assert len(set(tokens)) == 8
    assert run(logits, rows).tolist() == tokens


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("row", [Row(temperature=0), Row(), Row(top_k=3), Row(top_p=0.5), Row(min_p=0.1)])
def test_a_row_that_is_not_finite_harms_no_other(bad: float, row: Row) -> None:
    random = np.random.default_rng(1)
    logits = random.normal(size=(5, 300)).astype(np.float32)
    rows = [row, Row(seed=1), row, Row(top_p=0.7, seed=2), row]
    healthy = run(logits, rows)
    logits[2, 17] = bad
    logits[4] = np.nan
    tokens = run(logits, rows)
    assert tokens[[0, 1, 3]].tolist() == healthy[[0, 1, 3]].tolist()
    assert ((tokens >= 0) & (tokens < 300)).all()


@pytest.mark.parametrize("row", [Row(temperature=0), Row(), Row(top_k=3, top_p=0.5), Row(min_p=0.1)])
def test_a_row_that_is_allowed_nothing_gets_token_0_and_harms_no_other(row: Row) -> None:
    logits = np.random.default_rng(1).normal(size=(3, 100)).astype(np.float32)
    contradicting = {
        "allowed_token_ids": (7, 8),
        "stop_token_ids": (7,),
        "min_tokens": 3,
        "bad_words": ((8,),),
    }
    rows = [replace(row, allowed=()), replace(row, **contradicting), Row(allowed=(4,))]
    assert run_whole(seated(rows, 100), range(3), logits, rows).tolist() == [0, 0, 4]


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 1e30])
def test_no_temperature_overflows(temperature: float) -> None:
    logits = np.array([[-3e38, 0, 3e38, 1]], np.float32)
    token = run(logits, [Row(temperature=temperature, seed=3)])
    assert temperature > 1 or token.tolist() == [2]


def test_masks_are_read_little_endian() -> None:
    masks = np.array([[0b00000101, 0, 0, 0x80, 1, 0, 0, 0]], np.uint8)
    assert np.flatnonzero(unpack_bits(masks, 40)[0]).tolist() == [0, 2, 31, 32]
    assert unpack_bits(masks, 33).shape == (1, 33)
    logits = torch.zeros(3, 40)
    apply_masks(logits, torch.tensor([2]), masks)
    assert torch.nonzero(torch.isfinite(logits[2])).flatten().tolist() == [0, 2, 31, 32]
    assert bool(torch.isfinite(logits[:2]).all())
