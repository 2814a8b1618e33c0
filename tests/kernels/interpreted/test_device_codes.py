"""The interpreted device functions against `codes` and `noise`, bit for bit."""

import pytest
import torch

from sidestream.kernels.formats import codes, noise
from sidestream.kernels.formats.table import E2M1, E4M3, E5M2, E8M0
from sidestream.tests.kernels.formats import code_cases, code_probes
from sidestream.tests.kernels.oracle import assert_same_bits

FIRST = 2**33 + 7  # not the start of a group, and beyond 32 bits
POISON = 0xAB


def padded(values):
    """`values` and zeros up to a power of two, as a program's block must be."""
    block = 1 << (len(values) - 1).bit_length()
    return torch.nn.functional.pad(values, (0, block - len(values)))


@pytest.mark.parametrize("seed", [code_cases.SEED, -3, 1, 2**64 - 2], ids=hex)
def test_encode_and_noise(seed):
    values = padded(torch.cat([code_cases.inputs(element) for element in code_cases.SIGNED]))
    block = len(values)
    found = torch.full((6, block), POISON, dtype=torch.uint8)
    rounded = torch.full((block,), POISON, dtype=torch.int16)
    drawn = torch.zeros(block, dtype=torch.int32)
    code_probes.encode_probe[(1,)](
        values, found, rounded, drawn, seed, FIRST, HARDWARE=True, BLOCK=block
    )
    expected_noise = noise.noise_bits(seed, FIRST, block)
    assert torch.equal(drawn, expected_noise)
    for row, element in enumerate(code_cases.SIGNED):
        stochastic = codes.encode_stochastic(values, element, expected_noise)
        assert torch.equal(found[row], codes.encode(values, element)), element.name
        assert torch.equal(found[3 + row], stochastic), element.name
    expected = codes.round_bf16_stochastic(values, expected_noise)
    assert torch.equal(rounded, expected.view(torch.int16))


@pytest.mark.parametrize("first_group", [0, 2**31 - 1, 2**35], ids=hex)
def test_noise_of_a_block_is_that_of_its_elements(first_group):
    drawn = torch.zeros(1024, dtype=torch.int32)
    code_probes.block_noise_probe[(1,)](drawn, code_cases.SEED, first_group, BLOCK=1024)
    assert torch.equal(drawn, noise.noise_bits(code_cases.SEED, 16 * first_group, 1024))


def test_decode():
    every = torch.arange(256, dtype=torch.uint8)
    found = torch.full((5, 256), 1.5)
    code_probes.decode_probe[(1,)](every, found, HARDWARE=True)
    for row, element in enumerate((E4M3, E5M2, E2M1, E8M0)):
        assert_same_bits(found[row], codes.decode(every, element))
    assert_same_bits(found[4], codes.reciprocal_e8m0(every))


@pytest.mark.parametrize("shape", [(1, 2), (4, 32)], ids=str)
def test_nibbles(shape):
    made = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed = torch.full((shape[0], shape[1] // 2), POISON, dtype=torch.uint8)
    unpacked = torch.full(shape, POISON, dtype=torch.uint8)
    code_probes.nibble_probe[(1,)](made, packed, unpacked, ROWS=shape[0], NUMEL=shape[1])
    assert torch.equal(packed, codes.pack_nibbles(made))
    assert torch.equal(unpacked, made)


@pytest.mark.parametrize("element", code_cases.SIGNED, ids=lambda found: found.name)
@pytest.mark.parametrize("rule", codes.SCALE_RULES)
def test_scale_bytes(rule, element):
    amaxes = padded(code_cases.amaxes())
    found = torch.full(amaxes.shape, POISON, dtype=torch.uint8)
    code_probes.scale_probe[(1,)](amaxes, found, ELEMENT=element.name, RULE=rule, BLOCK=len(amaxes))
    assert torch.equal(found, codes.SCALE_RULES[rule](amaxes, element))


def test_amax_keeps_nan_and_infinity_and_harms_no_neighbour():
    values = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    values[1, 5], values[2, 0], values[3, 31] = float("nan"), -float("inf"), -1e-40
    values[4] = -0.0
    values[5, 3:5] = torch.tensor([float("inf"), -float("nan")])
    found = torch.full((8,), -1.0)
    code_probes.amax_probe[(1,)](values, found, ROWS=8, NUMEL=32)
    assert_same_bits(found, values.abs().amax(1))
    assert found.isnan().tolist() == [False, True, False, False, False, True, False, False]
