"""The interpreted reduce kernel against the definition, bit for bit, canaries included."""

import mmap

import pytest
import torch

from sidestream.kernels.pack import sum as reduce
from sidestream.tests.kernels import oracle

MODES = [(1.0, False), (0.3, True)]
MODE_IDS = ["sum", "scale-accumulate"]
MAP_NORESERVE = (
    0x4000  # Linux: reserve no swap, so that sparse memory may be larger than the machine
)
PAIRS = [(a, b) for a in oracle.DTYPES for b in oracle.DTYPES]


@pytest.mark.parametrize(("scale", "accumulate"), MODES, ids=MODE_IDS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_worlds(pair, scale, accumulate):
    """Shards of one full block and a tail: 2048 elements and more, aligned to 16 bytes."""
    for world in (1, 3, 9):
        oracle.check_reduce(reduce.reduce_, world, 2048 + 128, pair, scale, accumulate)


@pytest.mark.parametrize("world", [16, 23], ids="world {}".format)
def test_groups_of_rows_and_what_is_left(world):
    oracle.check_reduce(reduce.reduce_, world, 1030, (torch.bfloat16, torch.float32), 0.3, True)


@pytest.mark.parametrize("pair", PAIRS[::4], ids=str)
def test_unaligned_rows_and_memory(pair):
    oracle.check_reduce(reduce.reduce_, 3, 4099, pair, 1.0, False)
    oracle.check_reduce(reduce.reduce_, 3, 4096, pair, 1.0, False, start=1)


def test_small_and_empty_shards():
    for shard in (0, 1, 127):
        oracle.check_reduce(reduce.reduce_, 2, shard, PAIRS[0], 1.0, False)


def test_rows_beyond_32_bits():
    """Row 4 starts at element 2**32: sparse memory, of which only touched pages exist."""
    world, shard = 5, 2**30
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, world * shard * 2, flags=flags)
    parts = torch.frombuffer(memory, dtype=torch.bfloat16).view(world, shard)
    block = 1024
    parts[:, :block] = oracle.values(world * block, torch.bfloat16, seed=3).view(world, block)
    out = torch.full((block,), float("nan"))
    reduce._reduce_kernel[1,](
        out,
        parts,
        shard,
        None,
        WORLD=world,
        ACCUMULATE=False,
        ALIGNED=True,
        BLOCK=block,
    )
    oracle.assert_same_bits(out, oracle.naive_reduce(out, parts[:, :block]))
