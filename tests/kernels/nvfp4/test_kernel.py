"""Compiles NVFP4's and the transform's kernels for six GPUs and counts what they cost on Hopper.

Whole kernels for every target, without spills. On sm_90 the path of full tiles as well: its
instructions an element, and 16-byte accesses on the widest side, which is that of the values.
"""

import re
from functools import partial

import pytest

from sidestream.kernels import ahead, wide
from sidestream.kernels.ahead import HARDWARE_FP8, nvfp4
from sidestream.kernels.ahead import compile as aot
from sidestream.tests.kernels import costs

TARGETS = pytest.mark.parametrize("target", aot.TARGETS)
PHILOX = r"%c-(?:845247145|766435501)_i32"


def compiled_ahead():
    quantize = [case for case in ahead.cases() if case.op == "quantize_nvfp4_"]
    made = [one for case in quantize for one in (case.configuration, case.counted)]
    calls = [partial(costs.compile_for, one, "sm_90") for one in made]
    options = {"STOCHASTIC": True, "HADAMARD": True, "SWIZZLED": True}
    calls += [partial(compile_whole, target, **options) for target in aot.TARGETS]
    return calls + [partial(compile_rest, target) for target in aot.TARGETS]


def measured_widths(op, name):
    """Bits of the loads and of the stores on the path of full tiles, of a case within its gate."""
    compiled, found = costs.measure_case(op, name)
    assert found == []
    accesses = ahead.case_of(op, name).accesses(compiled)
    return [
        {access.bits for access in accesses if access.is_load == load} for load in (True, False)
    ]


@pytest.mark.parametrize("name", nvfp4.CHANGES)
def test_quantize_on_hopper(name):
    loads, stores = measured_widths("quantize_nvfp4_", name)
    assert loads == {128}
    assert max(stores) == 128


@pytest.mark.parametrize(("source", "transformed"), nvfp4.AMAX)
def test_amax_on_hopper(transformed, source):
    widths = measured_widths("amax_nvfp4_", source[1:] + " hadamard" * transformed)
    assert widths == [{128}, set()]


@pytest.mark.parametrize(("destination", "torchao", "swizzled"), nvfp4.DEQUANTIZE)
def test_dequantize_on_hopper(destination, torchao, swizzled):
    case = f"{'torchao' if torchao else 'te'} {destination[1:]}" + " swizzled" * swizzled
    loads, stores = measured_widths("dequantize_nvfp4_", case)
    assert max(loads) == 128
    assert stores == {128}


@pytest.mark.parametrize(("dtype", "inverse"), nvfp4.HADAMARD)
def test_hadamard_on_hopper(dtype, inverse):
    case = f"{'inverse' if inverse else 'forward'} {dtype[1:]}"
    assert measured_widths("hadamard16_", case) == [{128}, {128}]


def test_full_tiles_are_wide_on_amd():
    """Codes, of which a thread has 8 bytes there, and the scales aside."""
    for configuration in (nvfp4.hadamard_probe("*bf16", False), nvfp4.quantize_probe()):
        compiled = costs.compile_for(configuration, "gfx942")
        loads = {access.bits for access in compiled.accesses_of(wide.one_access)}
        assert loads == {128}
        stores = {access.bits for access in compiled.accesses if not access.is_load}
        assert max(stores) == (64 if "data" in configuration.signature else 128)


def check_whole(compiled):
    """Neither spills nor 32-bit products that count elements."""
    assert compiled.spill_bytes == 0
    assert compiled.registers > 0
    products = re.findall(r"arith\.muli [^\n]*: i32", compiled.intermediate)
    # Philox's multipliers, times a word of its counter that is 0, are the only ones.
    assert [found for found in products if not re.search(PHILOX, found)] == []


def compile_whole(target, **changed):
    return costs.compile_for(nvfp4.quantize_configuration(**changed), target)


@TARGETS
def test_quantize_compiles(target):
    """All options but torchao's scales, which the next test has."""
    compiled = compile_whole(target, STOCHASTIC=True, HADAMARD=True, SWIZZLED=True)
    check_whole(compiled)
    if target.startswith("sm_"):
        converted = "F2FP.SATFINITE.E4M3" in compiled.assembly
        assert converted == (target in HARDWARE_FP8)


def test_other_options_compile():
    check_whole(compile_whole("sm_90"))
    check_whole(compile_whole("sm_90", TORCHAO=True))


def compile_rest(target):
    made = (
        nvfp4.dequantize_configuration("*bf16", torchao=False, swizzled=True),
        nvfp4.hadamard_configuration("*fp16", inverse=True),
        nvfp4.amax_configuration("*bf16", transformed=True),
    )
    return [costs.compile_for(configuration, target) for configuration in made]


@TARGETS
def test_the_rest_compiles(target):
    dequantize, transform, amax = compile_rest(target)
    check_whole(dequantize)
    check_whole(transform)
    assert amax.spill_bytes == 0
