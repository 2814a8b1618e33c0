"""What is not finite, through messages and their sums: its own block is NaN, all others as ever."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.kernels.wire.layout import layout_of_numel, message_layout
from sidestream.kernels.wire.op import pack_message_, reduce_messages_, unpack_message_
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.wire import cases

FORMAT = pytest.mark.parametrize("name", cases.FORMATS)
BLOCKED = pytest.mark.parametrize("name", tuple(cases.NAN_SCALES))
ROW_NUMEL = 256
NUMELS = (600, 41)  # in blocks of 16 or 32 the last one is short; a gap of whole blocks follows
SCALE = 2.0  # so that 3e38 overflows
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "overflow": -3e38}
FLT_MAX = torch.finfo(torch.float32).max


def clean_tensors(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(numel, generator=generator) for numel in NUMELS]


def packed(tensors, name, **options):
    numels = [tensor.numel() for tensor in tensors]
    layout = message_layout(name, numels, row_numel=ROW_NUMEL)
    message = torch.full((layout.num_bytes,), cases.POISON, dtype=torch.uint8)
    pack_message_(message, tensors, name, row_numel=ROW_NUMEL, **options)
    return message, layout


def summed(messages, name, layout):
    out = torch.full((layout.numel,), 7.0)
    reduce_messages_(out, torch.stack(messages), name, row_numel=ROW_NUMEL)
    return out


def places(name):
    """(Tensor, element): the first, a middle, the last of blocks; ends of tensors."""
    block = cases.block_numel(name, ROW_NUMEL)
    second = block if 2 * block <= NUMELS[0] else 0
    inner = {second, second + block // 2, second + block - 1, 0, NUMELS[0] - 1}
    return [*((0, place) for place in sorted(inner)), (1, NUMELS[1] - 1)]


@FORMAT
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_sum_is_not_finite_in_that_block_alone(name, bad, world):
    """All others are as if the block had zeros."""
    given = [clean_tensors(rank) for rank in range(world)]
    messages, layouts = zip(*(packed(one, name, scale=SCALE) for one in given), strict=True)
    layout, block = layouts[0], cases.block_numel(name, ROW_NUMEL)
    for (which, place), rank in itertools.product(places(name), {0, world - 1}):
        spoiled = [tensor.clone() for tensor in given[rank]]
        zeroed = [tensor.clone() for tensor in given[rank]]
        spoiled[which][place] = BAD[bad]
        start = place // block * block
        zeroed[which][start : start + block] = 0.0
        sent, sent_zeros = list(messages), list(messages)
        sent[rank], _ = packed(spoiled, name, scale=SCALE)
        sent_zeros[rank], _ = packed(zeroed, name, scale=SCALE)
        touched = torch.zeros(layout.numel, dtype=torch.bool)
        touched[layout.offsets[which] + start :][:block] = True
        found, expected = (summed(parts, name, layout) for parts in (sent, sent_zeros))
        assert torch.equal(~found.isfinite(), touched)
        assert block == 1 or found[touched].isnan().all()
        oracle.assert_same_bits(found[~touched], expected[~touched])
        made = [torch.empty_like(tensor) for tensor in spoiled]
        unpack_message_(made, sent[rank], name, row_numel=ROW_NUMEL)
        for tensor, offset in zip(made, layout.offsets, strict=True):
            assert torch.equal(~tensor.isfinite(), touched[offset : offset + tensor.numel()])


@BLOCKED
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codes_and_scales_of_the_block(name, rounding):
    """To the bit, whatever is not finite, and whatever else is in the block."""
    noise = {} if rounding == "nearest" else {"rounding": rounding, "seed": cases.SEED}
    block = cases.block_numel(name, ROW_NUMEL)
    for bad in (math.nan, -math.nan, math.inf, -math.inf):
        tensors = clean_tensors(1)
        tensors[0][0] = bad
        message, layout = packed(tensors, name, **noise)
        data, scales, rows, _ = cases.sections(message, layout)
        data_bytes = block * layout.format.element.stored_bits // 8
        assert data[:data_bytes].tolist() == [cases.NAN_DATA[name]] * data_bytes
        stored = rows.view(torch.uint8) if name == "fp8_row" else scales
        nan = cases.NAN_SCALES[name]
        assert torch.equal(stored[: len(nan)], nan)


def test_a_row_of_nvfp4_without_finite_blocks():
    """Its amax is 0, of nothing; the amax of one with a block left is that block's."""
    tensor = torch.full((2 * ROW_NUMEL,), math.inf)
    tensor[ROW_NUMEL : ROW_NUMEL + 16] = torch.linspace(-3, 2, 16)
    message, layout = packed([tensor], "nvfp4")
    _, scales, rows, _ = cases.sections(message, layout)
    assert rows.tolist() == [0.0, 3.0]
    assert scales.tolist() == [0x7F] * 16 + [0x7E] + [0x7F] * 15
    out = [torch.empty_like(tensor)]
    unpack_message_(out, message, "nvfp4", row_numel=ROW_NUMEL)
    is_finite = torch.zeros(len(tensor), dtype=torch.bool)
    is_finite[ROW_NUMEL : ROW_NUMEL + 16] = True
    assert torch.equal(out[0].isfinite(), is_finite)


@FORMAT
def test_finite_values_that_sum_to_too_much_are_infinite(name):
    """Each decodes to a finite number, but of FP16; the block's others, 0 beside it, stay so."""
    tensors = [torch.zeros(NUMELS[0])]
    tensors[0][37] = -2e38
    message, layout = packed(tensors, name)
    other = summed([message], name, layout)
    assert other[37] == -math.inf if name == "fp16" else other[37].isfinite()
    found = summed([message] * 2, name, layout)
    assert found[37] == -math.inf
    found[37] = 0.0
    assert not found.any()


def bits_to_fp32(words):
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


USUAL = st.integers(0x3C00_0000, 0x43FF_FFFF)


@BLOCKED
@settings(max_examples=60, deadline=None)
@given(
    places=st.dictionaries(st.integers(0, 4 * ROW_NUMEL - 1), st.integers(0, 2**32 - 1)),
    usual=st.lists(USUAL, min_size=1, max_size=50),
    scale=st.sampled_from([1.0, -0.3, 1e-3, 4.0, 3e38]),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
def test_other_blocks_are_as_if_there_were_zeros(name, places, usual, scale, seed):
    """Of any bits: a block's scale and codes are NaN, or those of a message whose bad blocks are
    zeros.
    """
    numel, block = 4 * ROW_NUMEL, cases.block_numel(name, ROW_NUMEL)
    vector = bits_to_fp32((usual * numel)[:numel])
    vector[list(places)] = bits_to_fp32(places.values())
    noise = {} if seed is None else {"rounding": "stochastic", "seed": seed}
    is_bad = ~(vector * torch.tensor(scale)).isfinite().view(-1, block).all(1)
    zeroed = vector.view(-1, block).masked_fill(is_bad.unsqueeze(1), 0.0).view(-1)
    found, layout = packed([vector], name, scale=scale, **noise)
    expected, _ = packed([zeroed], name, scale=scale, **noise)
    data_bytes = block * layout.format.element.stored_bits // 8
    expected[layout.data_at : layout.scales_at].view(-1, data_bytes)[is_bad] = cases.NAN_DATA[name]
    scales_at = layout.row_scales_at if name == "fp8_row" else layout.scales_at
    nan = cases.NAN_SCALES[name]
    scales = expected[scales_at : scales_at + len(is_bad) * len(nan)]
    scales.view(-1, len(nan))[is_bad] = nan
    cases.assert_same_messages(found, expected, layout)
    assert torch.equal(decoded(found, name).isnan().view(-1, block).all(1), is_bad)
    assert not decoded(expected, name).view(-1, block)[~is_bad].isnan().any()


def decoded(message, name):
    numel = 4 * ROW_NUMEL
    assert len(message) == layout_of_numel(name, numel, row_numel=ROW_NUMEL).num_bytes
    out = torch.empty(numel)
    unpack_message_([out], message, name, row_numel=ROW_NUMEL)
    return out
