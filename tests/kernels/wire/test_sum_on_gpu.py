"""The compiled sum of wire messages on a GPU against the CPU path, bit for bit."""

import pytest
import torch

from sidestream.kernels.wire.op import reduce_messages_, reduce_peer_messages_
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.wire import sum_cases as cases

pytestmark = pytest.mark.gpu

ROW_NUMEL = 512


def check(function, messages, format, dtype, mode, start=0):
    """`messages` on the GPU, rows or a list, into memory that goes on on both sides."""
    numel = cases.layout_of_bytes(format, len(messages[0]), row_numel=ROW_NUMEL).numel
    around = torch.full((start + numel + 130,), oracle.CANARY, dtype=dtype)
    around[start : start + numel] = oracle.values(numel, dtype, seed=numel)
    found = around.cuda()
    on_cpu = [message.cpu() for message in messages]
    options = {"scale": mode[0], "accumulate": mode[1], "row_numel": ROW_NUMEL}
    reduce_peer_messages_(around[start : start + numel], on_cpu, format, **options)
    function(found[start : start + numel], messages, format, **options)
    oracle.assert_same_bits(found, around)


# Each is a kernel of its own, so not every world with every format and dtype.
WORLDS = [(name, world) for name in cases.FORMATS for world in (1, 2, 9, 1024)]
WORLDS += [("mxfp8", world) for world in (3, 4, 5, 6, 7, 8, 10, 11, 64)]


@pytest.mark.parametrize(("format", "world"), WORLDS, ids=str)
def test_worlds(format, world):
    """Full tiles and one that lacks groups; every rest of the loop."""
    numel = 4096 + 512 if world == 1024 else 3 * 4096 + 512
    messages = cases.random_messages(format, world, numel, ROW_NUMEL, seed=world).cuda()
    dtype, mode = oracle.DTYPES[world % 3], cases.MODES[1 + world % 3]
    check(reduce_messages_, messages, format, dtype, mode)
    check(reduce_peer_messages_, list(messages), format, dtype, mode)


@pytest.mark.parametrize("format", cases.FORMATS)
def test_unaligned_memory(format):
    messages = cases.random_messages(format, 5, 4096 + 512, ROW_NUMEL)
    for late in (1, 2, 4, 8):
        memory = torch.empty(messages.numel() + late, dtype=torch.uint8, device="cuda")
        rows = memory[late:].view(messages.shape).copy_(messages)
        check(reduce_messages_, rows, format, torch.float32, cases.MODES[3])
        check(reduce_peer_messages_, list(rows), format, torch.bfloat16, cases.MODES[0])
    check(reduce_messages_, messages.cuda(), format, torch.float32, cases.MODES[0], start=1)


def test_no_messages():
    out = torch.empty(0, device="cuda")
    messages = cases.random_messages("nvfp4", 2, 0).cuda()
    reduce_messages_(out, messages, "nvfp4")
    reduce_peer_messages_(out, list(messages), "nvfp4")
    torch.cuda.synchronize()
