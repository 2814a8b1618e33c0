"""Compiles NVFP4's and the transform's kernels for six GPUs and counts what they cost on Hopper.

Whole kernels for every target, without spills. On sm_90 the paths for full tiles by themselves:
instructions an element, and 16-byte accesses on the widest side, which is that of the values.
"""

import re
from functools import partial

import pytest

from sidestream.kernels import aot, hadamard, nvfp4, nvfp4_decode
from sidestream.tests.kernels import costs
from sidestream.tests.kernels import nvfp4_probes as probes

COUNTS = {name: "i64" for name in ("num_blocks", "row_blocks", "row_numel")}
NOISE = {"seed": "i64", "first_index": "i64"}
TARGETS = pytest.mark.parametrize("target", aot.TARGETS)
PHILOX = r"%c-(?:845247145|766435501)_i32"
# What a gate of the registry changes. An H100 has time for 25 instructions an element while it
# moves the bytes of a cast of BF16, and for 20 in a pass over the amax.
CHANGES = {
    "nearest": {},
    "nearest fp32": {"source": "*fp32"},
    "stochastic": {"STOCHASTIC": True},
    "torchao": {"TORCHAO": True},
    "swizzled": {"SWIZZLED": True},
    "hadamard": {"HADAMARD": True},
    "hadamard stochastic": {"HADAMARD": True, "STOCHASTIC": True},
}


def quantize_options(target, changed=None):
    options = dict.fromkeys(("HADAMARD", "STOCHASTIC", "TORCHAO", "SWIZZLED"), False)
    options |= {"HARDWARE": target in costs.HARDWARE_FP8, "TILE": nvfp4.TILE_NUMEL}
    return options | (changed or {})


def compile_quantize_probe(**changed):
    source = changed.pop("source", "*bf16")
    pointers = {"source": source, "data": "*u8", "scales": "*u8", "amax": "*fp32"}
    return costs.compile_kernel(
        probes.quantize_probe,
        pointers | {"columns": "i64"} | NOISE,
        quantize_options("sm_90", changed),
        "sm_90",
        num_warps=nvfp4.NUM_WARPS,
    )


def measure(op, case, compiled, tile):
    cost = costs.program_cost(compiled, tile / (nvfp4.NUM_WARPS * 32))
    return costs.measure(op, case, compiled, cost)


def compiled_ahead():
    calls = [partial(compile_quantize_probe, **changed) for changed in CHANGES.values()]
    options = {"STOCHASTIC": True, "HADAMARD": True, "SWIZZLED": True}
    return calls + [partial(compile_whole, target, **options) for target in aot.TARGETS]


@pytest.mark.parametrize("name", CHANGES)
def test_quantize_on_hopper(name):
    compiled = compile_quantize_probe(**CHANGES[name])
    assert measure("quantize_nvfp4_", name, compiled, nvfp4.TILE_NUMEL) == []
    values = compiled.accesses_of(hadamard.aligned_halves)
    assert {access.bits for access in values} == {128}
    stores = {access.bits for access in compiled.accesses if not access.is_load}
    assert 128 in stores


@pytest.mark.parametrize(
    ("source", "transformed"), [("*bf16", False), ("*fp32", False), ("*fp32", True)]
)
def test_amax_on_hopper(transformed, source):
    tile = nvfp4.TILE_NUMEL if transformed else nvfp4.AMAX_TILE_NUMEL
    compiled = costs.compile_kernel(
        probes.amax_probe,
        {"source": source, "amax": "*i32"},
        {"HADAMARD": transformed, "TILE": tile},
        "sm_90",
        num_warps=nvfp4.NUM_WARPS,
    )
    case = source[1:] + " hadamard" * transformed
    assert measure("amax_nvfp4_", case, compiled, tile) == []
    assert {access.bits for access in compiled.accesses} == {128}


@pytest.mark.parametrize(("destination", "torchao"), [("*bf16", False), ("*fp32", True)])
def test_dequantize_on_hopper(destination, torchao):
    compiled = costs.compile_kernel(
        probes.dequantize_probe,
        {"destination": destination, "data": "*u8", "scales": "*u8", "amax": "*fp32"},
        {"TORCHAO": torchao, "HARDWARE": True, "TILE": nvfp4_decode.TILE_NUMEL},
        "sm_90",
        num_warps=nvfp4_decode.NUM_WARPS,
    )
    case = f"{'torchao' if torchao else 'te'} {destination[1:]}"
    assert measure("dequantize_nvfp4_", case, compiled, nvfp4_decode.TILE_NUMEL) == []
    assert {access.bits for access in compiled.accesses if not access.is_load} == {128}


@pytest.mark.parametrize(("dtype", "inverse"), [("*bf16", False), ("*fp32", True)])
def test_hadamard_on_hopper(dtype, inverse):
    compiled = costs.compile_kernel(
        probes.hadamard_probe,
        {"source": dtype, "destination": dtype},
        {"INVERSE": inverse, "TILE": hadamard.BLOCK_NUMEL},
        "sm_90",
        num_warps=hadamard.NUM_WARPS,
    )
    case = f"{'inverse' if inverse else 'forward'} {dtype[1:]}"
    assert measure("hadamard16_", case, compiled, hadamard.BLOCK_NUMEL) == []
    assert {access.bits for access in compiled.accesses} == {128}


def check_whole(compiled):
    """Neither spills nor 32-bit products that count elements."""
    assert compiled.spill_bytes == 0
    assert compiled.registers > 0
    products = re.findall(r"arith\.muli [^\n]*: i32", compiled.intermediate)
    # Philox's multipliers, times a word of its counter that is 0, are the only ones.
    assert [found for found in products if not re.search(PHILOX, found)] == []


def compile_whole(target, **changed):
    pointers = {"source": "*bf16", "data": "*u8", "scales": "*u8", "amax": "*fp32"}
    return costs.compile_kernel(
        nvfp4._quantize_kernel,
        pointers | COUNTS | {"scale_columns": "i32"} | NOISE,
        quantize_options(target, changed) | {"FLAT": True},
        target,
        num_warps=nvfp4.NUM_WARPS,
    )


@TARGETS
def test_quantize_compiles(target):
    """All options but torchao's scales, which the next test has."""
    compiled = compile_whole(target, STOCHASTIC=True, HADAMARD=True, SWIZZLED=True)
    check_whole(compiled)
    if target.startswith("sm_"):
        converted = "F2FP.SATFINITE.E4M3" in compiled.assembly
        assert converted == (target in costs.HARDWARE_FP8)


def test_other_options_compile():
    check_whole(compile_whole("sm_90"))
    check_whole(compile_whole("sm_90", TORCHAO=True))


@TARGETS
def test_the_rest_compiles(target):
    check_whole(
        costs.compile_kernel(
            nvfp4_decode._dequantize_kernel,
            {"destination": "*bf16", "data": "*u8", "scales": "*u8", "amax": "*fp32"}
            | COUNTS
            | {"scale_columns": "i32"},
            {
                "TORCHAO": False,
                "SWIZZLED": True,
                "HARDWARE": target in costs.HARDWARE_FP8,
                "FLAT": True,
            }
            | {"TILE": nvfp4_decode.TILE_NUMEL},
            target,
            num_warps=nvfp4_decode.NUM_WARPS,
        )
    )
    check_whole(
        costs.compile_kernel(
            hadamard._hadamard_kernel,
            {"source": "*fp16", "destination": "*fp16", "num_groups": "i64"}
            | {"row_groups": "i32", "row_numel": "i32"},
            {"INVERSE": True, "FLAT": True, "BLOCK": hadamard.BLOCK_NUMEL},
            target,
            num_warps=hadamard.NUM_WARPS,
        )
    )
    amax = costs.compile_kernel(
        nvfp4._amax_kernel,
        {"source": "*bf16", "amax": "*i32"} | COUNTS,
        {"HADAMARD": True, "FLAT": True, "TILE": nvfp4.TILE_NUMEL},
        target,
        num_warps=nvfp4.NUM_WARPS,
    )
    assert amax.spill_bytes == 0
