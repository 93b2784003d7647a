"""Philox: Random123's vectors, NumPy and torch alike; and the noise made of it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servelite.worker.philox import GUMBEL_LARGEST, gumbel_numpy, gumbel_torch, philox4x32

WORD = st.integers(0, 2**32 - 1)
# Random123's known answers for philox4x32-10: counter, key, output.
VECTORS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def by_definition(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        low, high = (p0 % 2**32, p1 % 2**32), (p0 >> 32, p1 >> 32)
        c = [high[1] ^ c[1] ^ k[0], low[1], high[0] ^ c[3] ^ k[1], low[0]]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


@pytest.mark.parametrize("counter,key,expected", VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    arrays = [np.array([word]) for word in (*counter, *key)]
    tensors = [torch.tensor([word]) for word in (*counter, *key)]
    assert tuple(int(word[0]) for word in philox4x32(*arrays)) == expected
    assert tuple(int(word[0]) for word in philox4x32(*tensors)) == expected
    assert by_definition(counter, key) == expected


@given(counter=st.tuples(WORD, WORD, WORD, WORD), key=st.tuples(WORD, WORD))
def test_numpy_torch_and_the_definition_agree(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    arrays = [np.array([word]) for word in (*counter, *key)]
    tensors = [torch.tensor([word]) for word in (*counter, *key)]
    expected = by_definition(counter, key)
    assert tuple(int(word[0]) for word in philox4x32(*arrays)) == expected
    assert tuple(int(word[0]) for word in philox4x32(*tensors)) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_the_noise_is_gumbels_of_a_uniform_made_of_the_counter(seed: int) -> None:
    tokens = np.array([0, 1, 77, 2**31 - 1])
    noise = gumbel_numpy(tokens, 5, 3, seed)
    assert noise.dtype == np.float32
    for token, g in zip(tokens.tolist(), noise, strict=True):
        word = by_definition((token, 5, 3, 0), (seed % 2**32, seed >> 32))[0]
        u = ((word >> 9) + 0.5) / 2**23
        assert g == pytest.approx(-np.log(-np.log(u)), abs=2e-6)
    bits = seed - 2**64 if seed >= 2**63 else seed
    ours = gumbel_torch(torch.from_numpy(tokens), torch.tensor([5]), torch.tensor([3]), torch.tensor([bits]))
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours.numpy(), noise, rtol=0, atol=2e-6)


def test_the_noise_depends_on_each_of_its_arguments() -> None:
    base = gumbel_numpy(9, 5, 1, 3)
    others = [gumbel_numpy(8, 5, 1, 3), gumbel_numpy(9, 4, 1, 3), gumbel_numpy(9, 5, 0, 3)]
    others += [gumbel_numpy(9, 5, 1, 2), gumbel_numpy(9, 5, 1, 3 + 2**32), gumbel_numpy(5, 9, 1, 3)]
    assert len({float(g[0]) for g in (base, *others)}) == 7


def test_the_noise_is_distributed_as_it_should_be_and_bounded() -> None:
    noise = gumbel_numpy(np.arange(1_000_000), 0, 0, 12345).astype(np.float64)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.005)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.02)
    # The uniform's extremes, both exact in float32.
    extremes = (np.array([0, 2**23 - 1]).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
    assert extremes[0] > 0
    assert extremes[1] < 1
    assert -np.log(-np.log(extremes[1])) < GUMBEL_LARGEST
    assert np.isfinite(-np.log(-np.log(extremes[0])))


def test_it_needs_no_torch() -> None:
    code = "import sys; import servelite.worker.philox; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
