"""Compiles the MX kernels for six GPUs: what they cost an element on Hopper, widths, spills."""

import re

import pytest

from sidestream.kernels import aot, mx, mx_tiles

HARDWARE = ("sm_90", "sm_100", "sm_120")
OTHERS = [target for target in aot.TARGETS if target != "sm_90"]
ACCESS_BITS = 128
ELEMENTS_PER_THREAD = mx_tiles.TILE_BLOCKS * 32 // (mx_tiles.NUM_WARPS * 32)
MAX_REGISTERS = 80
# (element, stochastic, swizzled) -> instructions an element, to be kept. While an H100 moves its
# bytes there is time for 30 of MXFP8's and 25 of MXFP4's; swizzled tiles cost one division more.
QUANTIZE = {
    ("e4m3", False, False): 8.0,
    ("e5m2", False, False): 8.0,
    ("e2m1", False, False): 22.0,
    ("e2m1", True, False): 27.0,
    ("e4m3", True, False): 23.0,
    ("e4m3", False, True): 10.0,
    ("e2m1", False, True): 24.5,
    ("e2m1", True, True): 29.0,
}
DEQUANTIZE = {
    ("e4m3", False): 7.0,
    ("e2m1", False): 11.5,
    ("e4m3", True): 10.0,
    ("e2m1", True): 14.0,
}
PATHS = {"full": (True, False), "masked": (False, True), "both": (True, True)}


def compile_quantize(target, case, paths="both", source="*bf16"):
    element, stochastic, swizzled = case
    full, masked = PATHS[paths]
    return aot.compile_kernel(
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
            "HARDWARE": target in HARDWARE,
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
    return aot.compile_kernel(
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
            "HARDWARE": target in HARDWARE,
            "SWIZZLED": swizzled,
            "FULL": full,
            "MASKED": masked,
            "BLOCKS": mx_tiles.TILE_BLOCKS,
        },
        target,
        num_warps=mx_tiles.NUM_WARPS,
    )


def instructions_per_element(compiled):
    """All of the program's, addresses and all; the padding after its end left out."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);", compiled.assembly)
    counted = [line for line in lines if not re.search(r"\bNOP\b|BRA `\(\.L_x", line)]
    assert len(counted) > 50, "the count sees nothing"
    return len(counted) / ELEMENTS_PER_THREAD


def faults(compiled, budget):
    """What the gate finds wrong with a kernel of full tiles alone, as a list of sentences.

    Loads of values, or stores of them, are all 16 bytes wide; those of the scales, a byte a block,
    and of codes on their way in, half or a quarter of the values' width, are as wide as they come.
    """
    cost = instructions_per_element(compiled)
    found = [f"{cost:.2f} instructions an element, allowed {budget}"] if cost > budget else []
    for is_load in (True, False):
        widest = max((a.bits for a in compiled.accesses if a.is_load == is_load), default=0)
        if widest < ACCESS_BITS:
            found.append(f"{'loads' if is_load else 'stores'} of {widest} bits at most")
    if compiled.spill_bytes:
        found.append(f"{compiled.spill_bytes} bytes spilled")
    if compiled.registers > MAX_REGISTERS:
        found.append(f"{compiled.registers} registers, allowed {MAX_REGISTERS}")
    return found


@pytest.mark.parametrize("case", QUANTIZE, ids=str)
def test_quantize_on_hopper(case):
    compiled = compile_quantize("sm_90", case, "full")
    cost = instructions_per_element(compiled)
    print(f"quantize_mx {case}: {cost:.2f} instructions an element, {compiled.registers} registers")
    assert faults(compiled, QUANTIZE[case]) == []
    assert {access.bits for access in compiled.accesses if access.is_load} == {ACCESS_BITS}
    narrow = [access.bits for access in compiled.accesses if not access.is_load]
    assert [bits for bits in narrow if bits < ACCESS_BITS] == [8], "the scales are one store"
    converted = "F2FP.SATFINITE.E" in compiled.assembly
    assert converted == (case[0] != "e2m1" and not case[1])


@pytest.mark.parametrize("case", DEQUANTIZE, ids=str)
def test_dequantize_on_hopper(case):
    compiled = compile_dequantize("sm_90", case, "full")
    cost = instructions_per_element(compiled)
    print(f"dequantize_mx {case}: {cost:.2f} instructions, {compiled.registers} registers")
    assert faults(compiled, DEQUANTIZE[case]) == []
    assert {access.bits for access in compiled.accesses if not access.is_load} == {ACCESS_BITS}


@pytest.mark.parametrize("source", ["*fp32", "*fp16"])
def test_other_dtypes_on_hopper(source):
    compiled = compile_quantize("sm_90", ("e4m3", False, False), "full", source)
    assert faults(compiled, 9.0) == []
    assert faults(compile_dequantize("sm_90", ("e4m3", False), "full", source), 9.0) == []


@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_target_compiles_both_paths_without_spills(target):
    made = [
        compile_quantize(target, ("e4m3", False, False)),
        compile_quantize(target, ("e2m1", True, True)),
        compile_dequantize(target, ("e4m3", True)),
        compile_dequantize(target, ("e2m1", False)),
    ]
    for compiled in made:
        assert compiled.spill_bytes == 0
        assert {access.is_load for access in compiled.accesses} == {True, False}
        if target.startswith("sm_"):
            assert max(access.bits for access in compiled.accesses) >= ACCESS_BITS


def test_the_masked_path_alone_compiles():
    for case in (("e4m3", False, False), ("e2m1", True, True)):
        assert compile_quantize("sm_90", case, "masked").spill_bytes == 0


def test_gate_fails():
    """On masked accesses, and on a budget that is too small."""
    masked = compile_quantize("sm_90", ("e4m3", False, False), "masked")
    assert any("loads of 16 bits" in fault for fault in faults(masked, 100.0)), faults(masked, 1.0)
    full = compile_quantize("sm_90", ("e4m3", False, False), "full")
    assert any("instructions an element, allowed 5" in fault for fault in faults(full, 5.0))
