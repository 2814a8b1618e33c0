"""The interpreted grouped casts against `grouped.reference`, bit for bit, canaries included."""

import pytest
import torch

from sidestream.kernels.formats.table import E4M3, ELEMENTS
from sidestream.kernels.grouped import kernel, reference, two_pass
from sidestream.tests.kernels import oracle

POISON = 0xAB
SEED = -(2**63) + 12345
# (rows, columns, ends): tiles of 128 rows and less, empty groups, rows of none, one of all.
GROUPED = {
    "uneven": (300, 64, [130, 130, 135, 290]),
    "small": (5, 32, [2, 5]),
    "whole": (128, 128, [0, 128]),
    "short blocks": (77, 40, [13, 70]),
    "odd rows": (20, 17, [7, 20]),
    "three tiles across": (3, 160, [1, 3]),
    "out of order": (200, 64, [100, 90, 150]),
    "past the end": (200, 64, [100, 201]),
    "negative": (40, 64, [-1, 30]),
    "no rows": (0, 64, [0, 0]),
    "no rows, past the end": (0, 32, [1]),
}
CASES = pytest.mark.parametrize("case", GROUPED.values(), ids=GROUPED)


def given(case, dtype=torch.bfloat16, late=0, end_dtype=torch.int32):
    rows, columns, ends = case
    memory = oracle.values(rows * columns + late, dtype, seed=rows)
    return memory[late:].view(rows, columns), torch.tensor(ends, dtype=end_dtype)


def inside(shape, dtype, late=0):
    """Poisoned memory of `shape` in larger memory, and all of that."""
    numel = torch.Size(shape).numel()
    memory = torch.full((64 + late + numel * dtype.itemsize,), POISON, dtype=torch.uint8)
    return memory[32 + late : len(memory) - 32].view(dtype).view(shape), memory


def check(name, module, shapes, *arguments, late=0):
    """Both write into memory of their own; `arguments` come after what is written."""
    memories = []
    for found in (module, reference):
        made = [inside(shape, dtype, late) for shape, dtype in shapes]
        getattr(found, name)(*(view for view, _ in made), *arguments)
        memories.append(made)
    for (_, one), (view, other), (_, dtype) in zip(*memories, shapes, strict=True):
        if dtype is torch.float32:
            start = view.storage_offset()  # NaNs may differ in their bits
            one, other = (memory[start:].view(dtype) for memory in (one, other))
            oracle.assert_same_bits(one, other)
        else:
            assert torch.equal(one, other)


def check_blocks(case, x, ends, first_index=0, late=0, element="e4m3", seed=None):
    rows, columns, _ = case
    form = ELEMENTS[element]
    data = (rows, -(-columns // form.codes_per_byte)), torch.uint8
    scales = (reference.scales_numel(rows, -(-columns // 32), len(ends)),), torch.uint8
    arguments = (x, ends, element, "rceil", seed, first_index)
    check("quantize_mx_grouped_", kernel, (data, scales), *arguments, late=late)


def check_nvfp4(case, x, ends, first_index=0, late=0, seed=None):
    rows, columns, _ = case
    amaxes = torch.zeros(len(ends))
    reference.amax_nvfp4_grouped_(amaxes, x, ends)
    data = (rows, -(-columns // 2)), torch.uint8
    scales = (reference.scales_numel(rows, -(-columns // 16), len(ends)),), torch.uint8
    arguments = (x, ends, amaxes, seed, first_index)
    check("quantize_nvfp4_grouped_", kernel, (data, scales), *arguments, late=late)


@CASES
def test_fp8(case):
    x, ends = given(case)
    shapes = (tuple(x.shape), E4M3.dtype), ((len(ends),), torch.float32)
    check("quantize_fp8_grouped_", two_pass, shapes, x, ends, False)
    check("quantize_fp8_grouped_", two_pass, shapes, x.float(), ends.long(), True)


@CASES
def test_amax(case):
    x, ends = given(case, torch.float16)
    check("amax_nvfp4_grouped_", two_pass, (((len(ends),), torch.float32),), x, ends)


@CASES
def test_mx(case):
    x, ends = given(case)
    check_blocks(case, x, ends)
    check_blocks(case, x, ends, element="e2m1", seed=SEED, first_index=2**33)


@CASES
def test_nvfp4(case):
    x, ends = given(case)
    check_nvfp4(case, x, ends)
    check_nvfp4(case, x.float(), ends, seed=SEED, first_index=2**33)


def test_memory_that_begins_late_and_indices_that_start_no_group():
    case = (70, 64, [10, 60])
    x, ends = given(case, late=1)
    shapes = (tuple(x.shape), torch.float8_e5m2), ((len(ends),), torch.float32)
    check("quantize_fp8_grouped_", two_pass, shapes, x, ends, False)
    check_blocks(case, x, ends, seed=SEED, first_index=7)
    check_nvfp4(case, x, ends, seed=SEED, first_index=7)
    x, ends = given(case, torch.float32)
    check_blocks(case, x, ends, late=1)
    check_nvfp4(case, x, ends, late=1)


def test_more_groups_than_rows():
    case = (4, 32, [0, 0, 1, 1, 2, 3, 4, *[4] * 50])
    x, ends = given(case)
    check_blocks(case, x, ends)
    check_nvfp4(case, x, ends)
    shapes = (tuple(x.shape), E4M3.dtype), ((len(ends),), torch.float32)
    check("quantize_fp8_grouped_", two_pass, shapes, x, ends, False)
