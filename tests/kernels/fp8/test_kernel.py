"""Compiles the FP8 kernels for six GPUs and holds them to widths, spills and instruction counts."""

import re
from functools import partial

import pytest

from sidestream.kernels.ahead import fp8
from sidestream.kernels.ahead.fp8 import DEQUANTIZE, LINES
from sidestream.kernels.fp8 import kernel as fp8_kernels
from sidestream.tests.kernels import costs
from sidestream.tests.kernels.costs import widths


def compile_lines(target, case, element="e4m3", source="*bf16"):
    return costs.compile_for(fp8.lines_configuration(case, element, source), target)


def compile_square(target, element="e4m3", source="*bf16"):
    return costs.compile_for(fp8.square_configuration(element, source), target)


def compile_amax(target, source="*bf16"):
    return costs.compile_for(fp8.amax_configuration(source), target)


def compile_known(target, delayed, element="e4m3", source="*bf16"):
    return costs.compile_for(fp8.known_configuration(delayed, element, source), target)


def compile_dequantize(target, scaling, line, contiguous, out="*bf16"):
    configuration = fp8.dequantize_configuration(scaling, line, contiguous, out)
    return costs.compile_for(configuration, target)


def compile_update(target):
    return costs.compile_for(fp8.update_configuration(), target)


def compiled_ahead():
    calls = [partial(compile_lines, "sm_90", case) for case in LINES]
    calls += [partial(compile_dequantize, "sm_90", *case) for case in DEQUANTIZE]
    for target in costs.OTHERS:
        calls.append(partial(compile_lines, target, "1x128", "e4m3", "*fp32"))
        calls.append(partial(compile_square, target, "e4m3", "*fp32"))
        calls.append(partial(compile_amax, target))
        calls.append(partial(compile_known, target, True, "e5m2"))
        calls.append(partial(compile_dequantize, target, "128x128", 128, False))
        calls.append(partial(compile_update, target))
    return calls


@pytest.mark.parametrize("case", LINES)
def test_lines_on_hopper(case):
    compiled, found = costs.measure_case("quantize_fp8_", case)
    assert found == []
    assert widths(compiled, fp8_kernels._lines_kernel) == [{128}, {128}]
    assert "F2FP.SATFINITE.E4M3.F32" in compiled.assembly


def test_squares_on_hopper():
    compiled, found = costs.measure_case("quantize_fp8_", "128x128")
    assert found == []
    accesses = [a for a in compiled.accesses_of(fp8_kernels._square_kernel) if a.bits != 32]
    assert {(access.is_load, access.bits) for access in accesses} == {(True, 128), (False, 128)}


@pytest.mark.parametrize("delayed", [False, True], ids=["current", "delayed"])
def test_second_pass_on_hopper(delayed):
    """With delayed scaling both paths go on to one atomic, so that both are counted."""
    case = "delayed" if delayed else "known scale"
    compiled, found = costs.measure_case("quantize_fp8_", case)
    assert found == []
    wide = [access for access in compiled.accesses if access.bits == 128]
    assert len(wide) == 6
    first = [access for access in compile_amax("sm_90").accesses if access.bits == 128]
    assert len(first) == 4


@pytest.mark.parametrize("scaling", [scaling for scaling, _, _ in DEQUANTIZE])
def test_dequantize_on_hopper(scaling):
    compiled, found = costs.measure_case("dequantize_fp8_", scaling)
    assert found == []
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
