"""Compiles the conversions for six GPUs and holds them to widths, spills and instruction counts."""

import pytest

from sidestream.kernels import aot, cast, cast_kernels
from sidestream.tests.kernels.costs import path_cost, widths

HARDWARE = ("sm_90", "sm_100", "sm_120")
OTHERS = [target for target in aot.TARGETS if target != "sm_90"]
# Instructions an element of a BF16 source on sm_90, in a full block.
BUDGETS = {
    ("bf16", True): 27.0,
    ("e4m3", False): 4.0,
    ("e5m2", False): 4.0,
    ("e2m1", False): 17.0,
    ("e8m0", False): 15.0,
    ("e4m3", True): 20.0,
    ("e5m2", True): 20.0,
    ("e2m1", True): 19.0,
}
MODES = [(to, False) for to in cast.DTYPES] + [(to, True) for to in cast.STOCHASTIC]
IDS = [f"{to}-{'stochastic' if stochastic else 'nearest'}" for to, stochastic in MODES]
POINTERS = {"bf16": "*bf16", "fp16": "*fp16"}


def compile_cast(target, to, stochastic, source="*bf16"):
    return aot.compile_kernel(
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
            "HARDWARE": target in HARDWARE,
            "BLOCK": cast_kernels.block_numel(to),
        },
        target,
        num_warps=cast_kernels.NUM_WARPS,
    )


def compile_cast_back(target, from_, out="*bf16"):
    return aot.compile_kernel(
        cast_kernels._cast_back_kernel,
        {"out": out, "codes": POINTERS.get(from_, "*u8"), "numel": "i32"},
        {
            "FROM": from_,
            "ALIGNED": True,
            "HARDWARE": target in HARDWARE,
            "BLOCK": cast_kernels.block_numel(from_),
        },
        target,
        num_warps=cast_kernels.NUM_WARPS,
    )


@pytest.mark.parametrize(("to", "stochastic"), MODES, ids=IDS)
def test_cast_on_hopper(to, stochastic):
    compiled = compile_cast("sm_90", to, stochastic)
    assert compiled.spill_bytes == 0
    assert widths(compiled, cast_kernels._cast_full_block) == [{128}, {128}]
    if budget := BUDGETS.get((to, stochastic)):
        threads = 32 * cast_kernels.NUM_WARPS
        cost = path_cost(compiled, cast_kernels.block_numel(to) // threads)
        print(f"cast to {to}, stochastic={stochastic}: {cost:.2f} instructions an element")
        assert cost <= budget


@pytest.mark.parametrize("from_", cast.DTYPES)
def test_cast_back_on_hopper(from_):
    compiled = compile_cast_back("sm_90", from_)
    assert compiled.spill_bytes == 0
    assert widths(compiled, cast_kernels._cast_back_full_block) == [{128}, {128}]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", OTHERS)
def test_other_targets_compile_without_spills(target):
    """Every branch of the kernels, but not every format in each: `test_device_codes` has those."""
    modes = [("bf16", True), ("e4m3", False), ("e2m1", True), ("e8m0", False)]
    made = [compile_cast(target, to, stochastic, "*fp32") for to, stochastic in modes]
    made += [compile_cast_back(target, from_, "*fp32") for from_ in ("e5m2", "e2m1")]
    assert [compiled.spill_bytes for compiled in made] == [0] * len(made)
    assert all(compiled.accesses for compiled in made)
