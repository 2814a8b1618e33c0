"""The compiled packing and unpacking of messages on a GPU against the CPU path, bit for bit."""

import pytest
import torch

from sidestream.kernels import message_layout, pack_message_, read_header, unpack_message_
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.wire import cases

pytestmark = pytest.mark.gpu

# Full tiles and tails, rows of a program and beyond, nothing, and dims that are not contiguous.
SHAPES = [(9000,), (4096, 3), (1,), (0,), (66, 64), (130,), (31, 517)]
TRANSPOSED, UNALIGNED = 4, (3, 5)
FORMATS = pytest.mark.parametrize("name", cases.FORMATS)


def packed(given, name, start=0, **options):
    """The memory around a message that begins `start` bytes late, and the message in it."""
    numels = [tensor.numel() for tensor in given]
    layout = message_layout(name, numels, row_numel=options.get("row_numel", 1024))
    size = layout.num_bytes + 2 * cases.MARGIN
    memory = torch.full((size,), cases.POISON, dtype=torch.uint8, device=given[0].device)
    place = cases.MARGIN + start
    message = memory[place : place + layout.num_bytes]
    pack_message_(message, given, name, **options)
    return memory, message, layout


def check(given, name, start=0, **options):
    on_gpu = [moved(tensor) for tensor in given]
    expected_memory, expected, layout = packed(given, name, start, **options)
    memory, message, _ = packed(on_gpu, name, start, **options)
    cases.assert_same_messages(message.cpu(), expected, layout)
    around = torch.ones(len(memory), dtype=torch.bool)
    around[cases.MARGIN + start : cases.MARGIN + start + layout.num_bytes] = False
    assert torch.equal(memory.cpu()[around], expected_memory[around])
    assert read_header(message, row_numel=layout.row_numel) == (name, layout.numel)
    back = {"row_numel": layout.row_numel}
    for accumulate in (False, True):
        found = [moved(tensor) for tensor in given]
        values = [tensor.clone() for tensor in given]
        unpack_message_(found, expected.cuda(), name, scale=0.3, accumulate=accumulate, **back)
        unpack_message_(values, expected, name, scale=0.3, accumulate=accumulate, **back)
        for one, other in zip(found, values, strict=True):
            oracle.assert_same_bits(one, other)


def moved(tensor):
    """On the GPU with the strides and the alignment it has here."""
    memory = torch.zeros(tensor.numel() + tensor.storage_offset(), dtype=tensor.dtype).cuda()
    place = memory[tensor.storage_offset() :].as_strided(tensor.shape, tensor.stride())
    return place.copy_(tensor)


@FORMATS
def test_mixed_dtypes_in_one_launch(name):
    given = cases.tensors(SHAPES, transposed=[TRANSPOSED], unaligned=UNALIGNED)
    check(given, name, scale=0.3)
    check(given, name, row_numel=128, start=1)


@FORMATS
def test_one_dtype(name):
    given = [tensor.bfloat16() for tensor in cases.tensors([(8192,), (4096,), (5000,)])]
    check(given, name)
    if name in cases.STOCHASTIC:
        check(given, name, rounding="stochastic", seed=cases.SEED, first_indices=[0, 2**33, 5])


@FORMATS
def test_several_messages_in_one_launch(name):
    """Tensors over several, one without any, a flat buffer of all, and rows that are unaligned."""
    numel, offsets, parts = 13312, [0, 30720, 61440, 93184], 9
    given = cases.tensors([(25000,), (0,), (91, 83), (600,)], transposed=(2,), unaligned=(3,))
    layout = message_layout(name, [numel])
    noise = {"rounding": "stochastic", "seed": cases.SEED, "first_indices": [0, 0, 2**33, 5]}
    for options in ({"scale": -0.3}, noise if name in cases.STOCHASTIC else {}):
        for late in (0, 1):
            size = parts * layout.num_bytes + late
            memory = torch.full((size,), cases.POISON, dtype=torch.uint8)
            messages, expected = (one[late:].view(parts, -1) for one in (memory.cuda(), memory))
            pack_message_(messages, [moved(one) for one in given], name, offsets=offsets, **options)
            pack_message_(expected, given, name, offsets=offsets, **options)
            for one, other in zip(messages.cpu(), expected, strict=True):
                cases.assert_same_messages(one, other, layout)
            messages.copy_(expected)
            for like, places in ((given, offsets), ([torch.zeros(parts * numel)], [0])):
                found, wanted = [moved(one) for one in like], [one.clone() for one in like]
                unpack_message_(found, messages, name, offsets=places, accumulate=True)
                unpack_message_(wanted, expected, name, offsets=places, accumulate=True)
                for one, other in zip(found, wanted, strict=True):
                    oracle.assert_same_bits(one, other)


@FORMATS
def test_nothing(name):
    empty = torch.empty(0, device="cuda")
    for given in ([empty], [empty, empty]):
        _, message, layout = packed(given, name)
        assert read_header(message) == (name, layout.numel) == (name, 0)
