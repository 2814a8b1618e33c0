"""Compiles the device functions for six GPUs and counts what they cost an element on Hopper."""

import re

import pytest
import torch

from sidestream.kernels import aot, device_codes
from sidestream.tests.kernels import code_probes

BLOCK, WARPS = 4096, 4
HARDWARE = ("sm_90", "sm_100", "sm_120")
# Instructions an element, to be kept; 25 are what an H100 has time for while it moves FP4's bytes.
BUDGETS = {("e4m3", False): 8.0, ("e2m1", False): 22.0, ("e2m1", True): 26.0}
CASES = pytest.mark.parametrize(
    ("element", "stochastic"), BUDGETS, ids=["mxfp8", "mxfp4", "mxfp4-stochastic"]
)


def compile_mx(target, element, stochastic):
    return aot.compile_kernel(
        code_probes.mx_probe,
        {"values": "*bf16", "codes": "*u8", "scales": "*u8", "seed": "i64"},
        {
            "ELEMENT": element,
            "STOCHASTIC": stochastic,
            "HARDWARE": target in HARDWARE,
            "BLOCK": BLOCK,
        },
        target,
        num_warps=WARPS,
    )


def instructions_per_element(compiled):
    """All of the program's, addresses and all; the padding after its end left out."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);", compiled.assembly)
    counted = [line for line in lines if not re.search(r"\bNOP\b|BRA `\(\.L_x", line)]
    assert len(counted) > 100, "the count sees nothing"
    return len(counted) / (BLOCK / (WARPS * 32))


@CASES
def test_budget_on_hopper(element, stochastic):
    compiled = compile_mx("sm_90", element, stochastic)
    cost = instructions_per_element(compiled)
    print(f"{element} stochastic={stochastic}: {cost:.2f} instructions an element on sm_90")
    assert cost <= BUDGETS[element, stochastic]
    assert compiled.spill_bytes == 0
    widest = {access.bits for access in compiled.accesses if access.is_load}
    assert widest == {128}
    assert max(access.bits for access in compiled.accesses if not access.is_load) == 128
    converted = "F2FP.SATFINITE.E4M3.F32" in compiled.assembly
    assert converted == (element == "e4m3")


@CASES
@pytest.mark.parametrize("target", [target for target in aot.TARGETS if target != "sm_90"])
def test_other_targets_compile_without_spills(target, element, stochastic):
    compiled = compile_mx(target, element, stochastic)
    assert compiled.spill_bytes == 0
    assert compiled.accesses


@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_function_compiles(target):
    """With the hardware's conversions where there are any; E5M2's saturate as E4M3's do."""
    pointers = {"values": "*fp32", "found": "*u8", "rounded": "*i16", "noise": "*i32"}
    options = {"HARDWARE": target in HARDWARE}
    encoded = aot.compile_kernel(
        code_probes.encode_probe,
        {**pointers, "seed": "i64", "first": "i64"},
        options | {"BLOCK": 512},
        target,
        num_warps=4,
    )
    decoded = aot.compile_kernel(
        code_probes.decode_probe, {"codes": "*u8", "found": "*fp32"}, options, target, num_warps=4
    )
    assert encoded.spill_bytes == decoded.spill_bytes == 0
    if target in HARDWARE:
        for element in ("E4M3", "E5M2"):
            assert f"F2FP.SATFINITE.{element}.F32" in encoded.assembly


def test_noise_is_shared_by_a_thread_s_elements():
    """Seven rounds an element would be 28 multiplications; 16 elements share them."""
    compiled = compile_mx("sm_90", "e2m1", True)
    multiplications = len(re.findall(r"IMAD\.(?:HI|WIDE)\.U32", compiled.assembly))
    assert 14 <= multiplications <= 2 * 14 * (BLOCK // (WARPS * 32) // 8)


def test_cpu_has_no_hardware_conversion():
    assert not device_codes.has_hardware_fp8(torch.device("cpu"))
