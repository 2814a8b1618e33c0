"""The CPU implementation against the naive definition, and its casts against integers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.kernels.pack import reference
from sidestream.tests.kernels import oracle

MODES = [(1.0, False), (0.3, False), (1.0, True), (0.3, True)]
MODE_IDS = ["copy", "scale", "accumulate", "scale-accumulate"]
PAIRS = [(a, b) for a in oracle.DTYPES for b in oracle.DTYPES]
SHAPES = [(3, 5), (), (0,), (128,), (1,), (7, 1, 3), (0, 4), (300,), (16, 8), (33, 9)]


def _name(dtype):
    return str(dtype).removeprefix("torch.")


pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{_name(p[0])}-{_name(p[1])}")
modes = pytest.mark.parametrize(("scale", "accumulate"), MODES, ids=MODE_IDS)


@pytest.fixture(params=[True, False], ids=["chunked", "whole"])
def _chunked(request, monkeypatch):
    """Tiny odd chunks on one run, none on the other: results may not depend on them."""
    monkeypatch.setattr(reference, "CHUNK_NUMEL", 37 if request.param else 2**30)


@pytest.mark.usefixtures("_chunked")
@pairs
@modes
def test_pack_and_unpack(pair, scale, accumulate):
    case = oracle.make_case(SHAPES, [pair[0]], pair[1], transposed=(0, 8, 9))
    assert not case.tensors[9].is_contiguous()
    oracle.check_pack(reference.pack_, case, scale, accumulate)
    oracle.check_unpack(reference.unpack_, case, scale, accumulate)


@modes
def test_mixed_dtypes_in_a_flat_buffer_that_is_a_view(scale, accumulate):
    case = oracle.make_case(SHAPES, oracle.DTYPES, torch.float32, align=1)
    memory = torch.full((case.flat.numel() + 14,), oracle.CANARY)
    view = memory[7:-7]
    view.copy_(case.flat)
    oracle.check_pack(reference.pack_, case, scale, accumulate)
    expected = oracle.naive_pack(view, case.tensors, case.offsets, scale, accumulate)
    reference.pack_(view, case.tensors, case.offsets, scale, accumulate)
    oracle.assert_same_bits(view, expected)
    assert memory[:7].eq(oracle.CANARY).all()
    assert memory[-7:].eq(oracle.CANARY).all()


@pytest.mark.usefixtures("_chunked")
@pairs
@modes
def test_reduce_worlds_1_to_9(pair, scale, accumulate):
    for world in range(1, 10):
        oracle.check_reduce(reference.reduce_, world, 131, pair, scale, accumulate)


@pairs
@modes
def test_reduce_of_many_rows_in_one_call(pair, scale, accumulate):
    for world, shard in ((15, 131), (16, 131), (17, 1), (64, 2048), (1024, 128), (1024, 129)):
        oracle.check_reduce(reference.reduce_, world, shard, pair, scale, accumulate)


def test_many_rows_are_added_in_rank_order():
    """Each 2**-24 is lost to 1 by itself, and two of them added first would not be."""
    parts = torch.full((reference.MANY_ROWS + 1, 3), 2.0**-24)
    parts[0] = 1.0
    out = torch.empty(3)
    reference.reduce_(out, parts)
    assert out.tolist() == [1.0] * 3
    parts[[0, -1]] = parts[[-1, 0]]
    reference.reduce_(out, parts)
    assert out.tolist() == [1.0 + 2.0**-20] * 3


def test_many_rows_do_not_ask_for_the_default_device():
    parts, out = torch.ones(16, 5), torch.empty(5)
    with torch.device("meta"):
        reference.reduce_(out, parts)
    assert out.tolist() == [16.0] * 5


@modes
@pytest.mark.parametrize("world", [1, 2, 5, 16])
def test_reduce_of_nothing_writes_nothing(world, scale, accumulate):
    around = torch.full((8,), oracle.CANARY)
    out, parts = around[4:4], torch.full((world, 8), 2.0)[:, 4:4]
    assert reference.reduce_(out, parts, scale, accumulate) is None
    assert out.shape == (0,)
    assert around.eq(oracle.CANARY).all()


def test_reduce_adds_in_rank_order():
    """1 and -1 cancel only after 2**-30 was lost to the first 1: another order would keep it."""
    out = torch.empty(1)
    reference.reduce_(out, torch.tensor([[1.0], [2.0**-30], [-1.0]]))
    assert out.item() == 0.0
    reference.reduce_(out, torch.tensor([[1.0], [-1.0], [2.0**-30]]))
    assert out.item() == 2.0**-30


def test_reduce_sums_bf16_in_fp32():
    """256 + 1 is 257 in FP32 and 256 in BF16, so a BF16 accumulator would lose every 1."""
    out = torch.empty(1)
    reference.reduce_(out, torch.tensor([[256.0], [1.0], [1.0]]).bfloat16())
    assert out.item() == 258.0


def test_empty_list_leaves_the_buffer_alone():
    flat = torch.full((5,), oracle.CANARY)
    reference.pack_(flat, [], [])
    reference.unpack_([], flat, [])
    assert flat.eq(oracle.CANARY).all()


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=4).map(tuple), max_size=6),
    dtypes=st.lists(st.sampled_from(oracle.DTYPES), min_size=1, max_size=3),
    flat_dtype=st.sampled_from(oracle.DTYPES),
    align=st.sampled_from([1, 3, 8, 128]),
    scale=st.floats(-4, 4, width=32),
    accumulate=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_layout(shapes, dtypes, flat_dtype, align, scale, accumulate, seed):
    case = oracle.make_case(shapes, dtypes, flat_dtype, align=align, seed=seed)
    oracle.check_pack(reference.pack_, case, scale, accumulate)
    oracle.check_unpack(reference.unpack_, case, scale, accumulate)


def test_torch_rounds_to_nearest_even():
    """The definition leans on torch's casts; here they are checked against integers and numpy."""
    x = oracle.values(100_000, torch.float32, seed=5)
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    finite = ~x.isnan()
    bf16 = x.bfloat16()
    assert torch.equal(bf16.view(torch.int16).long()[finite] & 0xFFFF, kept[finite] & 0xFFFF)
    assert bf16.isnan().equal(x.isnan())
    with np.errstate(over="ignore"):
        fp16 = torch.from_numpy(x.numpy().astype(np.float16))
    oracle.assert_same_bits(x.half(), fp16)
