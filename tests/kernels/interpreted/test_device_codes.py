"""The interpreted device functions against `codes` and `noise`, bit for bit."""

from dataclasses import replace

import pytest
import torch

from sidestream.kernels.formats import codes, noise
from sidestream.kernels.formats.device_table import codec_of, element_of
from sidestream.kernels.formats.table import BF16, ELEMENT_FORMATS, FP16, MXFP8, SCALE_RULES
from sidestream.tests.kernels.formats import code_cases, code_probes
from sidestream.tests.kernels.oracle import assert_same_bits

FIRST = 2**33 + 7  # not the start of a group, and beyond 32 bits
POISON = 0xAB


def padded(values):
    """`values` and zeros up to a power of two, as a program's block must be."""
    block = 1 << (len(values) - 1).bit_length()
    return torch.nn.functional.pad(values, (0, block - len(values)))


def name_of(row):
    return row.name


@pytest.mark.parametrize("element", [*ELEMENT_FORMATS, BF16, FP16], ids=name_of)
@pytest.mark.parametrize("seed", [code_cases.SEED, -3, 1, 2**64 - 2], ids=hex)
def test_encode_and_noise(seed, element):
    values = padded(torch.cat([code_cases.inputs(signed) for signed in code_cases.SIGNED]))
    block, is_plain = len(values), element in (BF16, FP16)
    found = torch.zeros((2, block), dtype=element.dtype if is_plain else torch.uint8)
    drawn = torch.zeros(block, dtype=torch.int32)
    code_probes.encode_probe[(1,)](
        values, found, drawn, seed, FIRST, ELEMENT=element_of(element), HARDWARE=True, BLOCK=block
    )
    expected_noise = noise.noise_bits(seed, FIRST, block)
    assert torch.equal(drawn, expected_noise)
    if is_plain:
        assert_same_bits(found[0], values.to(element.dtype))
    else:
        assert torch.equal(found[0], codes.encode(values, element))
    if element is BF16:
        assert_same_bits(found[1], codes.round_bf16_stochastic(values, expected_noise))
    elif element.has_stochastic:
        assert torch.equal(found[1], codes.encode_stochastic(values, element, expected_noise))


@pytest.mark.parametrize("first_group", [0, 2**31 - 1, 2**35], ids=hex)
def test_noise_of_a_block_is_that_of_its_elements(first_group):
    drawn = torch.zeros(1024, dtype=torch.int32)
    code_probes.block_noise_probe[(1,)](drawn, code_cases.SEED, first_group, BLOCK=1024)
    assert torch.equal(drawn, noise.noise_bits(code_cases.SEED, 16 * first_group, 1024))


@pytest.mark.parametrize("element", ELEMENT_FORMATS, ids=name_of)
def test_decode(element):
    every = torch.arange(256, dtype=torch.uint8)
    found = torch.full((256,), 1.5)
    code_probes.decode_probe[(1,)](every, found, ELEMENT=element_of(element), HARDWARE=True)
    assert_same_bits(found, codes.decode(every, element))


def test_reciprocals():
    every = torch.arange(256, dtype=torch.uint8)
    found = torch.full((256,), 1.5)
    code_probes.reciprocal_probe[(1,)](every, found)
    assert_same_bits(found, codes.reciprocal_e8m0(every))


@pytest.mark.parametrize("shape", [(1, 2), (4, 32)], ids=str)
def test_nibbles(shape):
    made = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed = torch.full((shape[0], shape[1] // 2), POISON, dtype=torch.uint8)
    unpacked = torch.full(shape, POISON, dtype=torch.uint8)
    code_probes.nibble_probe[(1,)](made, packed, unpacked, ROWS=shape[0], NUMEL=shape[1])
    assert torch.equal(packed, codes.pack_nibbles(made))
    assert torch.equal(unpacked, made)


@pytest.mark.parametrize("element", code_cases.SIGNED, ids=lambda found: found.name)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_scale_bytes(rule, element):
    amaxes = padded(code_cases.amaxes())
    codec = codec_of(replace(MXFP8, element=element), SCALE_RULES[rule])
    found = torch.full(amaxes.shape, POISON, dtype=torch.uint8)
    code_probes.scale_probe[(1,)](amaxes, found, CODEC=codec, BLOCK=len(amaxes))
    assert torch.equal(found, codes.scale_byte(amaxes, element, SCALE_RULES[rule]))


def test_amax_keeps_nan_and_infinity_and_harms_no_neighbour():
    values = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    values[1, 5], values[2, 0], values[3, 31] = float("nan"), -float("inf"), -1e-40
    values[4] = -0.0
    values[5, 3:5] = torch.tensor([float("inf"), -float("nan")])
    found = torch.full((8,), -1.0)
    code_probes.amax_probe[(1,)](values, found, ROWS=8, NUMEL=32)
    assert_same_bits(found, values.abs().amax(1))
    assert found.isnan().tolist() == [False, True, False, False, False, True, False, False]
