"""Compiles NVFP4's and the transform's kernels for six GPUs and counts what they cost on Hopper.

Whole kernels for every target, without spills. On sm_90 the paths for full tiles by themselves:
instructions an element, and 16-byte accesses on the widest side, which is that of the values.
"""

import re

import pytest

from sidestream.kernels import aot, hadamard, nvfp4, nvfp4_decode
from sidestream.tests.kernels import nvfp4_probes as probes

HARDWARE = ("sm_90", "sm_100", "sm_120")
COUNTS = {name: "i64" for name in ("num_blocks", "row_blocks", "row_numel")}
NOISE = {"seed": "i64", "first_index": "i64"}
TARGETS = pytest.mark.parametrize("target", aot.TARGETS)
PHILOX = r"%c-(?:845247145|766435501)_i32"
# Instructions an element, to be kept. An H100 has time for 25 while it moves the bytes of a cast of
# BF16, and for 20 in a pass over the amax.
BUDGETS = {
    "nearest": ({}, 24.0),
    "nearest-fp32": ({"source": "*fp32"}, 24.0),
    "stochastic": ({"STOCHASTIC": True}, 26.0),
    "torchao": ({"TORCHAO": True}, 26.0),
    "swizzled": ({"SWIZZLED": True}, 30.0),
    "hadamard": ({"HADAMARD": True}, 32.0),
    "hadamard-stochastic": ({"HADAMARD": True, "STOCHASTIC": True}, 34.0),
}


def quantize_options(target, changed=None):
    options = dict.fromkeys(("HADAMARD", "STOCHASTIC", "TORCHAO", "SWIZZLED"), False)
    options |= {"HARDWARE": target in HARDWARE, "TILE": nvfp4.TILE_NUMEL}
    return options | (changed or {})


def compile_quantize_probe(**changed):
    source = changed.pop("source", "*bf16")
    pointers = {"source": source, "data": "*u8", "scales": "*u8", "amax": "*fp32"}
    return aot.compile_kernel(
        probes.quantize_probe,
        pointers | {"columns": "i64"} | NOISE,
        quantize_options("sm_90", changed),
        "sm_90",
        num_warps=nvfp4.NUM_WARPS,
    )


def instructions_per_element(compiled, tile):
    """All of the program's, addresses and all; the padding after its end left out."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);", compiled.assembly)
    counted = [line for line in lines if not re.search(r"\bNOP\b|BRA `\(\.L_x", line)]
    assert len(counted) > 50, "the count sees nothing"
    return len(counted) / (tile / (nvfp4.NUM_WARPS * 32))


def check_cost(compiled, tile, budget, name):
    cost = instructions_per_element(compiled, tile)
    print(f"{name}: {cost:.2f} instructions an element, {compiled.registers} registers on sm_90")
    assert cost <= budget
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 64


@pytest.mark.parametrize("name", BUDGETS)
def test_quantize_budget_on_hopper(name):
    changed, budget = BUDGETS[name]
    compiled = compile_quantize_probe(**changed)
    check_cost(compiled, nvfp4.TILE_NUMEL, budget, f"quantize {name}")
    values = compiled.accesses_of(hadamard.aligned_halves)
    assert {access.bits for access in values} == {128}
    stores = {access.bits for access in compiled.accesses if not access.is_load}
    assert 128 in stores


@pytest.mark.parametrize("source", ["*bf16", "*fp32"])
@pytest.mark.parametrize("transformed", [False, True], ids=["plain", "hadamard"])
def test_amax_budget_on_hopper(transformed, source):
    tile = nvfp4.TILE_NUMEL if transformed else nvfp4.AMAX_TILE_NUMEL
    compiled = aot.compile_kernel(
        probes.amax_probe,
        {"source": source, "amax": "*i32"},
        {"HADAMARD": transformed, "TILE": tile},
        "sm_90",
        num_warps=nvfp4.NUM_WARPS,
    )
    budget = 12.0 if transformed else 4.0
    check_cost(compiled, tile, budget, f"amax {source} {transformed}")
    assert {access.bits for access in compiled.accesses} == {128}


@pytest.mark.parametrize("torchao", [False, True], ids=["te", "torchao"])
@pytest.mark.parametrize("destination", ["*bf16", "*fp32"])
def test_dequantize_budget_on_hopper(destination, torchao):
    compiled = aot.compile_kernel(
        probes.dequantize_probe,
        {"destination": destination, "data": "*u8", "scales": "*u8", "amax": "*fp32"},
        {"TORCHAO": torchao, "HARDWARE": True, "TILE": nvfp4_decode.TILE_NUMEL},
        "sm_90",
        num_warps=nvfp4_decode.NUM_WARPS,
    )
    check_cost(compiled, nvfp4_decode.TILE_NUMEL, 14.0, f"dequantize {destination} {torchao}")
    assert {access.bits for access in compiled.accesses if not access.is_load} == {128}


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_hadamard_budget_on_hopper(dtype, inverse):
    compiled = aot.compile_kernel(
        probes.hadamard_probe,
        {"source": dtype, "destination": dtype},
        {"INVERSE": inverse, "TILE": hadamard.BLOCK_NUMEL},
        "sm_90",
        num_warps=hadamard.NUM_WARPS,
    )
    check_cost(compiled, hadamard.BLOCK_NUMEL, 11.0, f"hadamard16 {dtype} inverse={inverse}")
    assert {access.bits for access in compiled.accesses} == {128}


def check_whole(compiled):
    """Neither spills nor 32-bit products that count elements; something is read and written."""
    assert compiled.spill_bytes == 0
    assert {access.is_load for access in compiled.accesses} == {True, False}
    products = re.findall(r"arith\.muli [^\n]*: i32", compiled.intermediate)
    # Philox's multipliers, times a word of its counter that is 0, are the only ones.
    assert [found for found in products if not re.search(PHILOX, found)] == []


@TARGETS
@pytest.mark.parametrize(
    "changed",
    [{}, {"STOCHASTIC": True, "HADAMARD": True, "SWIZZLED": True}, {"TORCHAO": True}],
    ids=["nearest", "stochastic-hadamard-swizzled", "torchao"],
)
def test_quantize_compiles(target, changed):
    pointers = {"source": "*bf16", "data": "*u8", "scales": "*u8", "amax": "*fp32"}
    compiled = aot.compile_kernel(
        nvfp4._quantize_kernel,
        pointers | COUNTS | {"scale_columns": "i32"} | NOISE,
        quantize_options(target, changed) | {"FLAT": True},
        target,
        num_warps=nvfp4.NUM_WARPS,
    )
    check_whole(compiled)
    assert ("F2FP.SATFINITE.E4M3" in compiled.assembly) == (target in HARDWARE)


@TARGETS
def test_the_rest_compiles(target):
    check_whole(
        aot.compile_kernel(
            nvfp4_decode._dequantize_kernel,
            {"destination": "*bf16", "data": "*u8", "scales": "*u8", "amax": "*fp32"}
            | COUNTS
            | {"scale_columns": "i32"},
            {"TORCHAO": False, "SWIZZLED": True, "HARDWARE": target in HARDWARE, "FLAT": True}
            | {"TILE": nvfp4_decode.TILE_NUMEL},
            target,
            num_warps=nvfp4_decode.NUM_WARPS,
        )
    )
    check_whole(
        aot.compile_kernel(
            hadamard._hadamard_kernel,
            {"source": "*fp16", "destination": "*fp16", "num_groups": "i64"}
            | {"row_groups": "i32", "row_numel": "i32"},
            {"INVERSE": True, "FLAT": True, "BLOCK": hadamard.BLOCK_NUMEL},
            target,
            num_warps=hadamard.NUM_WARPS,
        )
    )
    amax = aot.compile_kernel(
        nvfp4._amax_kernel,
        {"source": "*bf16", "amax": "*i32"} | COUNTS,
        {"HADAMARD": True, "FLAT": True, "TILE": nvfp4.TILE_NUMEL},
        target,
        num_warps=nvfp4.NUM_WARPS,
    )
    assert amax.spill_bytes == 0
    assert amax.accesses
