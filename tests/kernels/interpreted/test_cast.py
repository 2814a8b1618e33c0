"""The interpreted conversions against `cast.reference`, bit for bit, canaries included."""

import pytest
import torch

from sidestream.kernels.cast import kernel, op, reference
from sidestream.kernels.formats import codes
from sidestream.kernels.formats.table import CASTS, E4M3
from sidestream.kernels.launch import LaunchConfig
from sidestream.kernels.tuned import forcing
from sidestream.tests.kernels.formats import code_cases
from sidestream.tests.kernels.oracle import assert_same_bits

POISON = 0xAB
FORMATS = pytest.mark.parametrize("to", CASTS)
MODES = [(to, False) for to in CASTS]
MODES += [(to, True) for to, form in CASTS.items() if form.has_stochastic]
MODE_IDS = [f"{to}-{'stochastic' if stochastic else 'nearest'}" for to, stochastic in MODES]
# The FP32 inputs are more than 2 blocks and a tail; first indices start and do not start a group.
FIRST = {True: 2**33 + 7, False: 0}


def inside(shape, dtype, start=16):
    """Poisoned memory of `shape`, `start` bytes into larger memory, and all of that memory."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.full((size + start + 64,), POISON, dtype=torch.uint8)
    return memory[start : start + size].view(dtype).view(shape), memory


def check_cast(x, to, stochastic, first_index, start=16):
    shape = op._paired_shape(x.shape) if to == "e2m1" else x.shape
    out, memory = inside(shape, CASTS[to].dtype, start)
    expected, expected_memory = inside(shape, CASTS[to].dtype, start)
    arguments = (x, to, code_cases.SEED if stochastic else None, first_index)
    kernel.cast_(out, *arguments)
    reference.cast_(expected, *arguments)
    if to in ("bf16", "fp16"):
        assert_same_bits(out, expected)
        size = out.numel() * out.element_size()
        memory[start : start + size] = expected_memory[start : start + size]
    assert torch.equal(memory, expected_memory)


@pytest.mark.parametrize(("to", "stochastic"), MODES, ids=MODE_IDS)
def test_every_kind_of_input(to, stochastic):
    x = torch.cat((code_cases.inputs(E4M3)[::9], code_cases.specials()))
    assert len(x) > 2 * 4096 and len(x) % 16
    check_cast(x, to, stochastic, 2**33 + 16)
    check_cast(x[1:300], to, stochastic, 2**33 + 7, start=17 if to[0] == "e" else 18)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("to", ["e4m3", "e2m1"])
def test_narrow_sources(to, dtype):
    check_cast(code_cases.every_bf16()[::13].to(dtype), to, False, 0)


@pytest.mark.parametrize("shape", [(1,), (), (3, 5), (2, 3, 1), (1, 4099), (130, 33)], ids=str)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_shapes_of_pairs(shape, stochastic):
    """Rows of odd length end with half a byte; noise counts elements, not places."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3
    check_cast(x, "e2m1", stochastic, 5)


def test_bits_do_not_depend_on_the_block():
    x = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    made = []
    for block in (512, 1024, 8192):
        out = torch.full((5000,), POISON, dtype=torch.uint8)
        with forcing("cast_", LaunchConfig(block, 4)) as forced:
            kernel.cast_(out, x, "e4m3", 3, 48)
        assert forced.asked
        made.append(out)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    assert not torch.equal(made[0], codes.encode(x, E4M3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@FORMATS
def test_cast_back(to, dtype):
    if to in ("bf16", "fp16"):
        stored = code_cases.every_bf16()[::15].to(CASTS[to].dtype)
    else:
        stored = torch.arange(4096 + 256).to(torch.uint8).view(CASTS[to].dtype)
    shape = (2 * len(stored),) if to == "e2m1" else stored.shape
    for source, start in ((stored, 16), (stored[1:300], 16 + dtype.itemsize)):
        shape = (2 * len(source),) if to == "e2m1" else source.shape
        out, memory = inside(shape, dtype, start)
        expected, expected_memory = inside(shape, dtype, start)
        kernel.cast_back_(out, source, to)
        reference.cast_back_(expected, source, to)
        assert_same_bits(out, expected)
        out.zero_(), expected.zero_()
        assert torch.equal(memory, expected_memory)
