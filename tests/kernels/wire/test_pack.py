"""Compiles the message kernels for six GPUs: instructions an element on Hopper, widths, spills."""

import itertools
import re
from functools import partial

import pytest

from sidestream.kernels.ahead import messages
from sidestream.kernels.ahead.messages import PACK, UNPACK
from sidestream.kernels.wire import tiles as message_tiles
from sidestream.kernels.wire import unpack as message_decode
from sidestream.tests.kernels import costs

ACCESS_BITS = 128
ELSEWHERE = ("bf16", "fp8_row", "mxfp4", "nvfp4")


def compile_pack(target, case, paths="both", scaled=False):
    configuration = messages.pack_configuration(*case, paths=paths, scaled=scaled)
    return costs.compile_for(configuration, target)


def compile_unpack(target, case, paths="both", scaled=False):
    configuration = messages.unpack_configuration(*case, paths=paths, scaled=scaled)
    return costs.compile_for(configuration, target)


def compiled_ahead():
    calls = [partial(compile_pack, "sm_90", case, "full") for case in PACK]
    calls += [partial(compile_unpack, "sm_90", case, "full") for case in UNPACK]
    turns = itertools.product(ELSEWHERE, costs.OTHERS)
    return calls + [partial(compile_by_turns, name, target) for name, target in turns]


def compile_by_turns(name, target):
    """Packing or unpacking, so that each generation of GPUs has both of every kind."""
    turn = ELSEWHERE.index(name) + costs.OTHERS.index(target)
    if turn % 2 == 0 or target == "gfx942":
        return compile_pack(target, (name, "bf16", False))
    return compile_unpack(target, (name, "bf16"))


def faults(compiled, values, is_load):
    """What is wrong with the accesses of a kernel of full tiles alone, as a list of sentences.

    values: the functions whose accesses, loads or stores, are those of the tensors, all 16 bytes
    wide. Those of the message, which are narrower, must be as wide wherever its codes are stored.
    """
    widths = {access.bits for access in compiled.accesses_of(*values) if access.is_load == is_load}
    return [] if widths == {ACCESS_BITS} else [f"accesses of {sorted(widths)} bits to the tensors"]


@pytest.mark.parametrize("case", PACK, ids=str)
def test_pack_on_hopper(case):
    name, kind, stochastic = case
    gate = f"{name} from {kind}" + " stochastic" * stochastic
    compiled, found = costs.measure_case("pack_message_", gate)
    assert found == []
    assert faults(compiled, messages.PACK_FUNCTIONS, True) == []
    stored = {access.bits for access in compiled.accesses if not access.is_load}
    assert ACCESS_BITS in stored
    converted = "F2FP.SATFINITE.E" in compiled.assembly
    assert converted == (name == "nvfp4" or ("fp8" in name and not stochastic))


@pytest.mark.parametrize("case", UNPACK, ids=str)
def test_unpack_on_hopper(case):
    name, kind = case
    compiled, found = costs.measure_case("unpack_message_", f"{name} to {kind}")
    assert found == []
    assert faults(compiled, [message_decode._store], False) == []


@pytest.mark.parametrize("target", costs.OTHERS)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_target_compiles_both_paths_without_spills(name, target):
    compiled = compile_by_turns(name, target)
    assert compiled.spill_bytes == 0
    assert compiled.registers > 0
    products = re.findall(r"arith\.muli [^\n]*: i32", compiled.intermediate)
    assert products == [], "a count of 32 bits"


def test_full_tiles_are_wide_on_amd():
    """Whose compiler takes hints from other sums than NVIDIA's; 64 bits are the table's."""
    for name in ("bf16", "mxfp8"):
        packed = compile_pack("gfx942", (name, "bf16", False), "full")
        loads = [access.bits for access in packed.accesses if access.is_load]
        assert set(loads) == {64, ACCESS_BITS}
        unpacked = compile_unpack("gfx942", (name, "bf16"), "full")
        assert {access.bits for access in unpacked.accesses if not access.is_load} == {ACCESS_BITS}


def test_everything_at_once():
    """Tensors of three dtypes, scaled; and back, accumulated."""
    packed = compile_pack("sm_90", ("fp8_1x128", "mixed", False), scaled=True)
    unpacked = compile_unpack("sm_90", ("fp8_1x128", "mixed"), scaled=True)
    assert packed.spill_bytes == unpacked.spill_bytes == 0
    loads = packed.accesses_of(message_tiles.loaded)
    assert {access.bits for access in loads} >= {16, 32, ACCESS_BITS}


def test_gate_fails_on_masked_accesses():
    masked = compile_pack("sm_90", ("mxfp8", "bf16", False), "masked")
    assert faults(masked, messages.PACK_FUNCTIONS, True) == ["accesses of [16] bits to the tensors"]
