"""The interpreted pack and unpack kernels against the definition, bit for bit, with canaries."""

import pytest
import torch

from sidestream.kernels.pack import kernel as pack
from sidestream.tests.kernels import far, oracle

# Full tiles (2048 FP32 or 4096 half-precision elements), tails, tensors smaller than a tile.
SHAPES = [(2048,), (9000,), (4097,), (0,), (), (3, 5), (66, 64), (130,), (2, 4096)]
TRANSPOSED = 6
MODES = [(1.0, False), (0.3, False), (1.0, True), (0.3, True)]
MODE_IDS = ["copy", "scale", "accumulate", "scale-accumulate"]


@pytest.mark.parametrize(("scale", "accumulate"), MODES, ids=MODE_IDS)
@pytest.mark.parametrize("flat_dtype", oracle.DTYPES, ids=str)
def test_mixed_dtypes_in_one_launch(flat_dtype, scale, accumulate):
    case = oracle.make_case(SHAPES, oracle.DTYPES, flat_dtype, transposed=[TRANSPOSED])
    assert not case.tensors[TRANSPOSED].is_contiguous()
    oracle.check_pack(pack.pack_, case, scale, accumulate)
    oracle.check_unpack(pack.unpack_, case, scale, accumulate)


def test_odd_offsets():
    case = oracle.make_case(SHAPES, oracle.DTYPES, torch.bfloat16, align=1)
    assert any(offset % 2 for offset in case.offsets)
    oracle.check_pack(pack.pack_, case, 0.3, True)
    oracle.check_unpack(pack.unpack_, case, 0.3, True)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_unaligned_tensors(dtype):
    """Tensors that start one element late in their storage, next to a buffer that is aligned."""
    case = oracle.make_case([(5000,), (300,)], [dtype], dtype)
    for index, tensor in enumerate(case.tensors):
        memory = torch.empty(tensor.numel() + 1, dtype=dtype)
        memory[1:].copy_(tensor)
        case.tensors[index] = memory[1:]
    oracle.check_pack(pack.pack_, case, 1.0, False)
    memory = [torch.full((t.numel() + 2,), oracle.CANARY, dtype=dtype) for t in case.tensors]
    pack.unpack_([m[1:-1] for m in memory], case.flat, case.offsets)
    for tensor, wanted in zip(
        memory, oracle.naive_unpack(case.tensors, case.flat, case.offsets), strict=True
    ):
        oracle.assert_same_bits(tensor[1:-1], wanted)
        assert tensor[0] == tensor[-1] == oracle.CANARY


def test_more_tensors_than_an_argument_block_holds():
    case = oracle.make_case([(3,)] * 130, oracle.DTYPES, torch.float32, align=1)
    oracle.check_pack(pack.pack_, case, 1.0, False)


def test_nothing_to_do_launches_nothing():
    flat = torch.full((5,), oracle.CANARY)
    pack.pack_(flat, [], [])
    pack.pack_(flat, [torch.empty(0), torch.empty(2, 0)], [0, 5])
    pack.unpack_([], flat, [])
    assert flat.eq(oracle.CANARY).all()


def test_moved_and_reused_addresses():
    """The table cache must notice new addresses, and must not care whose memory an address is."""
    flat = torch.zeros(256)
    keep = []
    for step in range(5):
        tensor = torch.full((200,), float(step))
        if step % 2:
            keep.append(tensor)  # the next one cannot have this address
        pack.pack_(flat, [tensor], [8])
        assert flat[8:208].eq(step).all()
        pack.pack_(flat, [tensor], [16])
        assert flat[16:216].eq(step).all()


@pytest.mark.parametrize("unpack", [False, True], ids=["pack", "unpack"])
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_offsets_beyond_32_bits(dtype, unpack):
    tensor = oracle.values(5000, dtype, seed=1)
    flat = torch.full((5100,), oracle.CANARY)
    if unpack:
        flat[:5000] = oracle.values(5000, torch.float32, seed=2)
        expected = oracle.naive_unpack([tensor], flat, [0])[0]
        far.pack_far_tile(flat, tensor, unpack=True)
        oracle.assert_same_bits(tensor, expected)
    else:
        expected = oracle.naive_pack(flat, [tensor], [0])
        far.pack_far_tile(flat, tensor, unpack=False)
        oracle.assert_same_bits(flat, expected)
