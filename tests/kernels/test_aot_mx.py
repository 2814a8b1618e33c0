"""Compiles the MX kernels for six GPUs: what they cost an element on Hopper, widths, spills."""

import re
from functools import partial

import pytest

from sidestream.kernels import aot, mx, mx_tiles
from sidestream.tests.kernels import costs

ACCESS_BITS = 128
ELEMENTS_PER_THREAD = mx_tiles.TILE_BLOCKS * 32 // (mx_tiles.NUM_WARPS * 32)
# (element, stochastic, swizzled). While an H100 moves its bytes there is time for 30 instructions
# an element of MXFP8 and 25 of MXFP4; swizzled tiles cost one division more.
QUANTIZE = [
    ("e4m3", False, False),
    ("e5m2", False, False),
    ("e2m1", False, False),
    ("e2m1", True, False),
    ("e4m3", True, False),
    ("e4m3", False, True),
    ("e2m1", False, True),
    ("e2m1", True, True),
]
DEQUANTIZE = [("e4m3", False), ("e2m1", False), ("e4m3", True), ("e2m1", True)]
PATHS = {"full": (True, False), "masked": (False, True), "both": (True, True)}


def compile_quantize(target, case, paths="both", source="*bf16"):
    element, stochastic, swizzled = case
    full, masked = PATHS[paths]
    return costs.compile_kernel(
        mx._quantize_kernel,
        {
            "source": source,
            "data": "*u8",
            "scales": "*u8",
            "rows": "i32",
            "row_numel": "i32",
            "width": "i32",
            "seed": "i64",
            "first_index": "i64",
        },
        {
            "ELEMENT": element,
            "RULE": "rceil",
            "STOCHASTIC": stochastic,
            "HARDWARE": target in costs.HARDWARE_FP8,
            "SWIZZLED": swizzled,
            "FULL": full,
            "MASKED": masked,
            "BLOCKS": mx_tiles.TILE_BLOCKS,
        },
        target,
        num_warps=mx_tiles.NUM_WARPS,
    )


def compile_dequantize(target, case, paths="both", out="*bf16"):
    element, swizzled = case
    full, masked = PATHS[paths]
    return costs.compile_kernel(
        mx._dequantize_kernel,
        {
            "out": out,
            "data": "*u8",
            "scales": "*u8",
            "rows": "i32",
            "row_numel": "i32",
            "width": "i32",
        },
        {
            "ELEMENT": element,
            "HARDWARE": target in costs.HARDWARE_FP8,
            "SWIZZLED": swizzled,
            "FULL": full,
            "MASKED": masked,
            "BLOCKS": mx_tiles.TILE_BLOCKS,
        },
        target,
        num_warps=mx_tiles.NUM_WARPS,
    )


def compiled_ahead():
    calls = [partial(compile_quantize, "sm_90", case, "full") for case in QUANTIZE]
    calls += [partial(compile_dequantize, "sm_90", case, "full") for case in DEQUANTIZE]
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


def measure(op, case, compiled):
    cost = costs.program_cost(compiled, ELEMENTS_PER_THREAD)
    return costs.measure(op, case, compiled, cost)


@pytest.mark.parametrize("case", QUANTIZE, ids=str)
def test_quantize_on_hopper(case):
    element, stochastic, swizzled = case
    compiled = compile_quantize("sm_90", case, "full")
    name = element + " stochastic" * stochastic + " swizzled" * swizzled
    assert measure("quantize_mx_", name, compiled) == []
    assert faults(compiled) == []
    assert {access.bits for access in compiled.accesses if access.is_load} == {ACCESS_BITS}
    narrow = [access.bits for access in compiled.accesses if not access.is_load]
    assert [bits for bits in narrow if bits < ACCESS_BITS] == [8], "the scales are one store"
    converted = "F2FP.SATFINITE.E" in compiled.assembly
    assert converted == (element != "e2m1" and not stochastic)


@pytest.mark.parametrize("case", DEQUANTIZE, ids=str)
def test_dequantize_on_hopper(case):
    element, swizzled = case
    compiled = compile_dequantize("sm_90", case, "full")
    assert measure("dequantize_mx_", element + " swizzled" * swizzled, compiled) == []
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
        assert costs.program_cost(compiled, ELEMENTS_PER_THREAD) <= 9.0


@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_target_compiles_both_paths_without_spills(target):
    for compiled in (
        compile_quantize(target, ("e2m1", True, True)),
        compile_dequantize(target, ("e2m1", True)),
    ):
        assert compiled.spill_bytes == 0
        assert compiled.registers > 0


def test_the_masked_path_alone_compiles():
    assert compile_quantize("sm_90", ("e2m1", True, True), "masked").spill_bytes == 0


def test_gate_fails_on_masked_accesses():
    masked = compile_quantize("sm_90", ("e4m3", False, False), "masked")
    assert "loads of 16 bits at most" in faults(masked)


def test_noise_is_shared_by_a_thread_s_elements():
    """Seven rounds an element would be 28 multiplications; 16 elements share them."""
    compiled = compile_quantize("sm_90", ("e2m1", True, False), "full")
    multiplications = len(re.findall(r"IMAD\.(?:HI|WIDE)\.U32", compiled.assembly))
    assert 14 <= multiplications <= 2 * 14 * (ELEMENTS_PER_THREAD // 8)
