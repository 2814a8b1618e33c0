"""Noise: Philox against known answers and a scalar twin, slices, and what sharing a word costs."""

import pytest
import torch

from sidestream.kernels.formats import noise

MASK = 0xFFFF_FFFF
# Random123 1.14, tests/kat_vectors: philox4x32 with 7 rounds, counter, key, result.
KNOWN = [
    ([0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    ([MASK] * 4, [MASK] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
    ),
]


def scalar_philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(7):
        product_0, product_2 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            product_2 >> 32 ^ c[1] ^ k[0],
            product_2 & MASK,
            product_0 >> 32 ^ c[3] ^ k[1],
            product_0 & MASK,
        ]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def scalar_noise(seed, index):
    group, lane = divmod(index, 16)
    word = scalar_philox([group & MASK, group >> 32, 0, 0], [seed & MASK, seed >> 32 & MASK])[
        lane // 4
    ]
    shift = 8 * (lane % 4)
    rotated = (word >> shift | word << (32 - shift)) & MASK
    return rotated - (1 << 32) if rotated >> 31 else rotated


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN, ids=["zeros", "ones", "pi"])
def test_scalar_twin_gives_the_known_answers(counter, key, result):
    assert scalar_philox(counter, key) == result


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 2**64 - 1, 0x9E3779B97F4A7C15], ids=hex)
@pytest.mark.parametrize("first_index", [0, 5, 2**31 - 3, 2**36 - 7, 2**40 + 11], ids=str)
def test_noise_is_the_scalar_twin(seed, first_index):
    found = noise.noise_bits(seed, first_index, 37)
    assert found.dtype is torch.int32
    assert found.tolist() == [scalar_noise(seed, first_index + i) for i in range(37)]


def test_known_answer_through_the_tensors():
    words = noise.philox(0, torch.tensor([0]))
    assert [int(word) for word in words] == KNOWN[0][2]


@pytest.mark.parametrize("size", [1, 7, 16, 100, 999], ids="slices of {}".format)
def test_any_slicing_gives_the_same_bits(size):
    whole = noise.noise_bits(42, 0, 1000)
    parts = [noise.noise_bits(42, start, min(size, 1000 - start)) for start in range(0, 1000, size)]
    assert torch.equal(torch.cat(parts), whole)


def test_every_bit_is_even_odds_and_seeds_differ():
    """Each of the 32 bits is set in half of 2^18 draws, within 4.5 sigma of 256."""
    draws = noise.noise_bits(3, 0, 2**18)
    counts = torch.stack([(draws >> bit & 1).sum() for bit in range(32)])
    assert (counts - 2**17).abs().max() < 4.5 * 256
    assert (draws != noise.noise_bits(4, 0, 2**18)).float().mean() > 0.999


def test_what_sharing_a_word_costs():
    """Events of two elements of one word correlate by at most 1/256: only ties of the top byte."""
    uniform = (noise.noise_bits(5, 0, 2**20).long() & MASK).double() / 2**32
    group = uniform.view(-1, 4)
    bound = 1 / 256 + 4.5 / len(group) ** 0.5
    for threshold in (1 / 512, 0.25, 0.5, 0.9):
        hits = (group >= threshold).double()
        covariance = torch.cov(hits.T)
        off_diagonal = covariance - covariance.diag().diag()
        assert off_diagonal.abs().max() < bound * 0.25 + 1e-9


def test_nothing_drawn_and_bad_counts():
    assert noise.noise_bits(1, 17, 0).shape == (0,)
    with pytest.raises(ValueError, match=r"first_index: expected 0 to .*, got -1"):
        noise.noise_bits(1, -1, 4)
    with pytest.raises(ValueError, match=r"numel: expected 0 or more, got -4"):
        noise.noise_bits(1, 0, -4)
