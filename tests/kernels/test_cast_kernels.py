"""Compiles the conversions for six GPUs and holds them to widths, spills and instruction counts."""

from functools import partial

import pytest

from sidestream.kernels import cast_kernels, cast_ops
from sidestream.tests.kernels import costs
from sidestream.tests.kernels.costs import path_cost, widths

THREADS = 32 * cast_kernels.NUM_WARPS
MODES = [(to, False) for to in cast_ops.DTYPES] + [(to, True) for to in cast_ops.STOCHASTIC]
IDS = [f"{to}-{'stochastic' if stochastic else 'nearest'}" for to, stochastic in MODES]
POINTERS = {"bf16": "*bf16", "fp16": "*fp16"}


def compile_cast(target, to, stochastic, source="*bf16"):
    return costs.compile_kernel(
        cast_kernels._cast_kernel,
        {
            "out": POINTERS.get(to, "*u8"),
            "x": source,
            "numel": "i32",
            "columns": "i32",
            "seed": "i64",
            "first_index": "i64",
        },
        {
            "TO": to,
            "STOCHASTIC": stochastic,
            "GROUPED": True,
            "ODD_ROWS": False,
            "ALIGNED": True,
            "HARDWARE": target in costs.HARDWARE_FP8,
            "BLOCK": cast_kernels.block_numel(to),
        },
        target,
        num_warps=cast_kernels.NUM_WARPS,
    )


def compile_cast_back(target, from_, out="*bf16"):
    return costs.compile_kernel(
        cast_kernels._cast_back_kernel,
        {"out": out, "codes": POINTERS.get(from_, "*u8"), "numel": "i32"},
        {
            "FROM": from_,
            "ALIGNED": True,
            "HARDWARE": target in costs.HARDWARE_FP8,
            "BLOCK": cast_kernels.block_numel(from_),
        },
        target,
        num_warps=cast_kernels.NUM_WARPS,
    )


def compiled_ahead():
    calls = [partial(compile_cast, "sm_90", *mode) for mode in MODES]
    calls += [partial(compile_cast_back, "sm_90", name) for name in cast_ops.DTYPES]
    for target in costs.OTHERS:
        calls.append(partial(compile_cast, target, "e4m3", False, "*fp32"))
        calls.append(partial(compile_cast, target, "e2m1", True, "*fp32"))
    return calls


@pytest.mark.parametrize(("to", "stochastic"), MODES, ids=IDS)
def test_cast_on_hopper(to, stochastic):
    compiled = compile_cast("sm_90", to, stochastic)
    cost = path_cost(compiled, cast_kernels.block_numel(to) // THREADS)
    assert costs.measure("cast_", to + " stochastic" * stochastic, compiled, cost) == []
    assert widths(compiled, cast_kernels._cast_full_block) == [{128}, {128}]


@pytest.mark.parametrize("from_", cast_ops.DTYPES)
def test_cast_back_on_hopper(from_):
    compiled = compile_cast_back("sm_90", from_)
    cost = path_cost(compiled, cast_kernels.block_numel(from_) // THREADS)
    assert costs.measure("cast_back_", from_, compiled, cost) == []
    assert widths(compiled, cast_kernels._cast_back_full_block) == [{128}, {128}]


@pytest.mark.parametrize("target", costs.OTHERS)
def test_other_targets_compile_without_spills(target):
    """Every branch of the kernels, but not every format: `test_device_codes` has those."""
    made = [
        compile_cast(target, "e4m3", False, "*fp32"),
        compile_cast(target, "e2m1", True, "*fp32"),
        compile_cast_back(target, "e2m1"),
    ]
    assert [compiled.spill_bytes for compiled in made] == [0] * len(made)
    assert all(compiled.registers for compiled in made)
