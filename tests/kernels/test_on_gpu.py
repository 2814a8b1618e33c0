"""The compiled kernels on a GPU against the definition, bit for bit, by the public functions."""

import pytest
import torch

from sidestream.kernels import pack_, reduce_, tables, unpack_
from sidestream.kernels.pack import kernel as pack
from sidestream.kernels.table_cache import TableCache
from sidestream.tests.kernels import far, oracle

pytestmark = pytest.mark.gpu

MODES = [(1.0, False), (0.3, False), (1.0, True), (0.3, True)]
MODE_IDS = ["copy", "scale", "accumulate", "scale-accumulate"]
PAIRS = [(a, b) for a in oracle.DTYPES for b in oracle.DTYPES]
SHAPES = [(2048,), (9000,), (4097,), (0,), (), (3, 5), (66, 64), (130,), (2, 4096), (1031, 517)]
TRANSPOSED = 6

modes = pytest.mark.parametrize(("scale", "accumulate"), MODES, ids=MODE_IDS)


def _public(function):
    def call(*arguments):
        scale, accumulate = arguments[-2:]
        return function(*arguments[:-2], scale=scale, accumulate=accumulate)

    return call


@modes
@pytest.mark.parametrize("align", [128, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("flat_dtype", oracle.DTYPES, ids=str)
def test_mixed_dtypes_in_one_launch(flat_dtype, align, scale, accumulate):
    case = oracle.make_case(
        SHAPES, oracle.DTYPES, flat_dtype, align=align, transposed=[TRANSPOSED], device="cuda"
    )
    oracle.check_pack(_public(pack_), case, scale, accumulate)
    oracle.check_unpack(_public(unpack_), case, scale, accumulate)


def check_reduce(world, pair, scale, accumulate):
    for shard, start in ((4096 + 128, 0), (4099, 0), (4096, 1), (1, 0), (0, 0)):
        oracle.check_reduce(
            _public(reduce_), world, shard, pair, scale, accumulate, start=start, device="cuda"
        )


@modes
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_reduce(pair, scale, accumulate):
    check_reduce(3, pair, scale, accumulate)


@pytest.mark.parametrize("world", [1, 2, 7, 8, 9, 64])
def test_reduce_of_every_world(world):
    """Each is a kernel of its own, so not every dtype in each."""
    check_reduce(world, (torch.bfloat16, torch.float32), 0.3, True)


def test_cpu_and_gpu_agree():
    """What a CPU run and a GPU run share: the bits of a step's pack and sum."""
    case = oracle.make_case(SHAPES, oracle.DTYPES, torch.bfloat16)
    flat = case.flat.cuda()
    pack_(flat, [tensor.cuda() for tensor in case.tensors], case.offsets, scale=0.3)
    pack_(case.flat, case.tensors, case.offsets, scale=0.3)
    oracle.assert_same_bits(flat, case.flat)


def test_a_table_is_found_again_and_never_when_it_would_be_wrong():
    flat = torch.zeros(300_000, device="cuda")
    tensor = torch.ones(290_000, device="cuda")
    pack_(flat, [tensor], [128])
    before = len(pack._tables)
    for step in range(3):
        tensor.fill_(step)
        pack_(flat, [tensor], [128])
        assert flat[128:290_128].eq(step).all()
    assert len(pack._tables) == before
    pack_(flat, [tensor], [256])
    assert len(pack._tables) == before + 1
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        pack_(flat, [tensor], [256])
    torch.cuda.synchronize()
    assert len(pack._tables) == before + 2


def test_addresses_that_move_and_come_back():
    flat = torch.zeros(5000, device="cuda")
    keep = []
    for step in range(20):
        tensor = torch.full((4500,), float(step), device="cuda")
        if step % 3:
            keep.append(tensor)
        pack_(flat, [tensor], [128])
        assert flat[128:4628].eq(step).all()


@pytest.mark.parametrize("unpack", [False, True], ids=["pack", "unpack"])
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_offsets_beyond_32_bits(dtype, unpack):
    tensor = oracle.values(5000, dtype, seed=1, device="cuda")
    flat = torch.full((5100,), oracle.CANARY, device="cuda")
    flat[:5000] = oracle.values(5000, torch.float32, seed=2, device="cuda")
    expected_tensor = oracle.naive_unpack([tensor], flat, [0])[0]
    expected_flat = oracle.naive_pack(flat, [tensor], [0])
    far.pack_far_tile(flat, tensor, unpack=unpack)
    if unpack:
        oracle.assert_same_bits(tensor, expected_tensor)
    else:
        oracle.assert_same_bits(flat, expected_flat)


def test_a_tensor_of_more_than_2_to_the_31_elements():
    numel = 2**31 + 4224
    needed = 5 * numel * 2
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory")
    tensor = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    tensor[-4224:] = oracle.values(4224, torch.bfloat16, seed=4, device="cuda")
    flat = torch.zeros(numel + 128, dtype=torch.bfloat16, device="cuda")
    pack_(flat, [tensor], [128])
    oracle.assert_same_bits(flat[-4224:], tensor[-4224:])
    assert not flat[:128].any()


@pytest.mark.parametrize("count", [2, 40], ids=["arguments", "copied"])
def test_a_table_is_the_same_on_the_device(count):
    tensors = [torch.empty(5000, device="cuda") for _ in range(count)]
    offsets = [5120 * index for index in range(count)]
    keys = tables.tensor_keys(torch.empty(5120 * count, device="cuda"), tensors, offsets)
    table = TableCache().get(keys, 8192, torch.device("cuda", 0))
    torch.cuda.synchronize()
    assert torch.equal(table.entries.cpu(), tables.tensor_table(keys, 8192).entries)
