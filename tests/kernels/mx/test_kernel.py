"""Compiles the MX kernels for six GPUs: what they cost an element on Hopper, widths, spills."""

import re
from functools import partial

import pytest

from sidestream.kernels import ahead
from sidestream.kernels.ahead import compile as aot
from sidestream.kernels.ahead import mx
from sidestream.kernels.ahead.count import program_cost
from sidestream.tests.kernels import costs

ACCESS_BITS = 128
ELEMENTS_PER_THREAD = ahead.case_of("quantize_mx_", "e4m3").elements_per_thread


def compile_quantize(target, case, paths="both", source="*bf16"):
    configuration = mx.quantize_configuration(*case, paths=paths, source=source)
    return costs.compile_for(configuration, target)


def compile_dequantize(target, case, paths="both", out="*bf16"):
    configuration = mx.dequantize_configuration(*case, paths=paths, out=out)
    return costs.compile_for(configuration, target)


def compiled_ahead():
    calls = [partial(compile_quantize, "sm_90", case, "full") for case in mx.QUANTIZE]
    calls += [partial(compile_dequantize, "sm_90", case, "full") for case in mx.DEQUANTIZE]
    for target in aot.TARGETS:
        calls.append(partial(compile_quantize, target, ("e2m1", True, True)))
        calls.append(partial(compile_dequantize, target, ("e2m1", True)))
    return calls


def faults(compiled):
    """What is wrong with the widths of a kernel of full tiles alone, as a list of sentences.

    Loads of values, or stores of them, are all 16 bytes wide; those of the scales, a byte a block,
    and of codes on their way in, half or a quarter of the values' width, are as wide as they come.
    """
    found = []
    for is_load in (True, False):
        widest = max((a.bits for a in compiled.accesses if a.is_load == is_load), default=0)
        if widest < ACCESS_BITS:
            found.append(f"{'loads' if is_load else 'stores'} of {widest} bits at most")
    return found


@pytest.mark.parametrize("case", mx.QUANTIZE, ids=str)
def test_quantize_on_hopper(case):
    element, stochastic, swizzled = case
    name = element + " stochastic" * stochastic + " swizzled" * swizzled
    compiled, found = costs.measure_case("quantize_mx_", name)
    assert found == []
    assert faults(compiled) == []
    assert {access.bits for access in compiled.accesses if access.is_load} == {ACCESS_BITS}
    narrow = [access.bits for access in compiled.accesses if not access.is_load]
    assert [bits for bits in narrow if bits < ACCESS_BITS] == [8], "the scales are one store"
    converted = "F2FP.SATFINITE.E" in compiled.assembly
    assert converted == (element != "e2m1" and not stochastic)


@pytest.mark.parametrize("case", mx.DEQUANTIZE, ids=str)
def test_dequantize_on_hopper(case):
    element, swizzled = case
    compiled, found = costs.measure_case("dequantize_mx_", element + " swizzled" * swizzled)
    assert found == []
    assert faults(compiled) == []
    assert {access.bits for access in compiled.accesses if not access.is_load} == {ACCESS_BITS}


@pytest.mark.parametrize("source", ["*fp32", "*fp16"])
def test_other_dtypes_on_hopper(source):
    for compiled in (
        compile_quantize("sm_90", ("e4m3", False, False), "full", source),
        compile_dequantize("sm_90", ("e4m3", False), "full", source),
    ):
        assert faults(compiled) == []
        assert compiled.spill_bytes == 0
        assert program_cost(compiled, ELEMENTS_PER_THREAD) <= 9.0


@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_target_compiles_both_paths_without_spills(target):
    for compiled in (
        compile_quantize(target, ("e2m1", True, True)),
        compile_dequantize(target, ("e2m1", True)),
    ):
        assert compiled.spill_bytes == 0
        assert compiled.registers > 0


def test_full_tiles_are_wide_on_amd():
    compiled = compile_quantize("gfx942", ("e4m3", False, False), "full")
    assert faults(compiled) == []
    assert {access.bits for access in compiled.accesses if access.is_load} == {ACCESS_BITS}


def test_the_masked_path_alone_compiles():
    assert compile_quantize("sm_90", ("e2m1", True, True), "masked").spill_bytes == 0


def test_gate_fails_on_masked_accesses():
    masked = compile_quantize("sm_90", ("e4m3", False, False), "masked")
    assert "loads of 16 bits at most" in faults(masked)


@pytest.mark.parametrize("target", ahead.HARDWARE_FP8)
def test_the_amax_keeps_nans(target):
    """The interpreter, whose maxima are others, cannot show it: no maximum drops a NaN."""
    compiled = compile_quantize(target, ("e4m3", False, False), "full")
    assert set(re.findall(r"FMNMX[^ ]*", compiled.assembly)) <= {"FMNMX.NAN", "FMNMX3.NAN"}
    assert "FMNMX.NAN" in compiled.assembly


def test_noise_is_shared_by_a_thread_s_elements():
    """Seven rounds an element would be 28 multiplications; 16 elements share them."""
    compiled = compile_quantize("sm_90", ("e2m1", True, False), "full")
    multiplications = len(re.findall(r"IMAD\.(?:HI|WIDE)\.U32", compiled.assembly))
    assert 14 <= multiplications <= 2 * 14 * (ELEMENTS_PER_THREAD // 16)
