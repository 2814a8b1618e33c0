"""Compiles the FP8 kernels for six GPUs and holds them to widths, spills and instruction counts."""

import re
from functools import partial

import pytest

from sidestream.kernels import fp8_kernels, fp8_launch, fp8_two_pass
from sidestream.tests.kernels import costs
from sidestream.tests.kernels.costs import path_cost, widths

POINTERS = {"codes": "*u8", "scale_inv": "*fp32"}
# LINE, COUNT, CONTIGUOUS, warps.
LINES = {
    "1x128": (128, 32, True, 4),
    "1x128 of rows": (128, 32, False, 4),
    "short rows": (512, 8, False, 4),
    "rows": (4096, 1, False, 4),
    "long rows": (16384, 1, False, 16),
}


def compile_lines(target, case, element="e4m3", source="*bf16"):
    line, count, contiguous, num_warps = LINES[case]
    return costs.compile_kernel(
        fp8_kernels._lines_kernel,
        POINTERS | {"x": source, "rows": "i32", "columns": "i32", "lines": "i32"},
        {
            "ELEMENT": element,
            "POWER_OF_2": False,
            "LINE": line,
            "COUNT": count,
            "SINGLE": "rows" in case and not case.startswith("1x128"),
            "CONTIGUOUS": contiguous,
            "WIDE": True,
            "HARDWARE": target in costs.HARDWARE_FP8,
        },
        target,
        num_warps=num_warps,
    )


def compile_square(target, element="e4m3", source="*bf16"):
    return costs.compile_kernel(
        fp8_kernels._square_kernel,
        POINTERS | {"x": source, "rows": "i32", "columns": "i32"},
        {
            "ELEMENT": element,
            "POWER_OF_2": True,
            "WIDE": True,
            "HARDWARE": target in costs.HARDWARE_FP8,
        },
        target,
        num_warps=fp8_launch.SQUARE_WARPS,
    )


def compile_amax(target, source="*bf16"):
    return costs.compile_kernel(
        fp8_two_pass._amax_kernel,
        {"amax": "*i32", "x": source, "columns": "i32", "parts": "i32"},
        {"ALIGNED": True, "WIDE": False, "BLOCK": fp8_launch.BLOCK},
        target,
        num_warps=fp8_launch.NUM_WARPS,
    )


def compile_known(target, delayed, element="e4m3", source="*bf16"):
    signature = POINTERS | {"x": source, "amax": "*i32", "columns": "i32", "parts": "i32"}
    if delayed:
        signature |= {"scale": "*fp32"}
    return costs.compile_kernel(
        fp8_two_pass._known_kernel,
        signature,
        ({} if delayed else {"scale": None})
        | {
            "ELEMENT": element,
            "POWER_OF_2": False,
            "ALIGNED": True,
            "WIDE": False,
            "HARDWARE": target in costs.HARDWARE_FP8,
            "BLOCK": fp8_launch.BLOCK,
        },
        target,
        num_warps=fp8_launch.NUM_WARPS,
    )


def compile_dequantize(target, scaling, line, contiguous, out="*bf16"):
    return costs.compile_kernel(
        fp8_kernels._dequantize_kernel,
        POINTERS
        | {"out": out, "rows": "i32", "columns": "i32", "lines": "i32", "matrix_rows": "i32"},
        {
            "SCALING": scaling,
            "MATRICES": False,
            "ELEMENT": "e4m3",
            "LINE": line,
            "COUNT": fp8_launch.BLOCK // line,
            "SINGLE": scaling == "row",
            "CONTIGUOUS": contiguous,
            "WIDE": True,
            "HARDWARE": target in costs.HARDWARE_FP8,
        },
        target,
        num_warps=fp8_launch.NUM_WARPS,
    )


def compile_update(target):
    return costs.compile_kernel(
        fp8_two_pass._update_kernel,
        {"history": "*fp32", "scales": "*fp32", "target": "fp32", "length": "i32"},
        {"MOST_RECENT": False, "BLOCK": 1024},
        target,
        num_warps=fp8_launch.NUM_WARPS,
    )


DEQUANTIZE = [
    ("tensor", 4096, True),
    ("row", 512, False),
    ("1x128", 128, True),
    ("128x128", 128, False),
]


def compiled_ahead():
    calls = [partial(compile_lines, "sm_90", case) for case in LINES]
    calls += [partial(compile_dequantize, "sm_90", *case) for case in DEQUANTIZE]
    for target in costs.OTHERS:
        calls.append(partial(compile_lines, target, "1x128", "e4m3", "*fp32"))
        calls.append(partial(compile_square, target, "e4m3", "*fp32"))
        calls.append(partial(compile_known, target, True, "e5m2"))
        calls.append(partial(compile_dequantize, target, "128x128", 128, False))
    return calls


@pytest.mark.parametrize("case", LINES)
def test_lines_on_hopper(case):
    compiled = compile_lines("sm_90", case)
    line, count, _, num_warps = LINES[case]
    cost = path_cost(compiled, line * count // (num_warps * 32))
    assert costs.measure("quantize_fp8_", case, compiled, cost) == []
    assert widths(compiled, fp8_kernels._lines_kernel) == [{128}, {128}]
    assert "F2FP.SATFINITE.E4M3.F32" in compiled.assembly


def test_squares_on_hopper():
    compiled = compile_square("sm_90")
    cost = path_cost(compiled, 128 * 128 // (fp8_launch.SQUARE_WARPS * 32))
    assert costs.measure("quantize_fp8_", "128x128", compiled, cost) == []
    accesses = [a for a in compiled.accesses_of(fp8_kernels._square_kernel) if a.bits != 32]
    assert {(access.is_load, access.bits) for access in accesses} == {(True, 128), (False, 128)}


@pytest.mark.parametrize("delayed", [False, True], ids=["current", "delayed"])
def test_second_pass_on_hopper(delayed):
    """With delayed scaling both paths go on to one atomic, so that both are counted."""
    compiled = compile_known("sm_90", delayed)
    case = "delayed" if delayed else "known scale"
    assert costs.measure("quantize_fp8_", case, compiled, path_cost(compiled, 32)) == []
    wide = [access for access in compiled.accesses if access.bits == 128]
    assert len(wide) == 6
    first = [access for access in compile_amax("sm_90").accesses if access.bits == 128]
    assert len(first) == 4


@pytest.mark.parametrize(("scaling", "line", "contiguous"), DEQUANTIZE, ids=str)
def test_dequantize_on_hopper(scaling, line, contiguous):
    compiled = compile_dequantize("sm_90", scaling, line, contiguous)
    assert costs.measure("dequantize_fp8_", scaling, compiled, path_cost(compiled, 32)) == []
    accesses = [a for a in compiled.accesses if a.bits != 32]
    assert {(access.is_load, access.bits) for access in accesses} == {(True, 128), (False, 128)}


@pytest.mark.parametrize("target", costs.OTHERS)
def test_other_targets_compile_without_spills(target):
    made = [
        compile_lines(target, "1x128", "e4m3", "*fp32"),
        compile_square(target, "e4m3", "*fp32"),
        compile_amax(target),
        compile_known(target, True, "e5m2"),
        compile_dequantize(target, "128x128", 128, False),
        compile_update(target),
    ]
    assert [compiled.spill_bytes for compiled in made] == [0] * len(made)
    assert all(compiled.registers for compiled in made)


def test_no_32_bit_product_counts_elements():
    """Products of scalars; those of the lanes of a program stay below its block."""
    made = [compile_lines("sm_90", case) for case in LINES]
    made += [compile_square("sm_90"), compile_amax("sm_90"), compile_known("sm_90", True)]
    made += [compile_dequantize("sm_90", "128x128", 128, False), compile_update("sm_90")]
    for compiled in made:
        assert re.findall(r"arith\.muli [^\n]*: i64", compiled.intermediate)
        assert not re.findall(r"arith\.muli [^\n]*: i32", compiled.intermediate)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_divisions_are_ieee(target):
    """Approximate division would move scales by two ulp: its instructions must not be there."""
    for compiled in (compile_lines(target, "1x128", "e4m3", "*fp32"), compile_update(target)):
        assert "precise_divf" in compiled.intermediate
        assert "arith.divf" not in compiled.intermediate
