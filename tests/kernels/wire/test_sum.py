"""Compiles the sum of wire messages for six GPUs: its cost on Hopper, widths of accesses, spills.

A sum of 8 messages, by what it takes for an element of the result. An H100 has time for `BUDGETS`
instructions while it moves the bytes of the element, an H200 for 1.43 times less.
"""

import re
from functools import partial

import pytest

from sidestream.kernels.ahead import CountError, messages
from sidestream.kernels.ahead import compile as aot
from sidestream.kernels.ahead.count import path_cost
from sidestream.kernels.ahead.messages import WORLD
from sidestream.kernels.wire import sum as reduce_message_kernels
from sidestream.kernels.wire.layout import message_format
from sidestream.tests.kernels import costs

ACCESS_BITS = 128
# Besides the elements' 16 bytes: the widths in bits of loads of scales, of a thread's share.
SCALE_BITS = {"fp8_row": {32}, "fp8_1x128": {32}, "mxfp8": {8}, "mxfp4": {8}, "nvfp4": {16, 32}}
# (format, result) -> instructions for which an H100 has time while it moves the bytes.
BUDGETS = {
    ("fp32", "*fp32"): 356,
    ("bf16", "*fp32"): 198,
    ("bf16", "*bf16"): 178,
    ("fp16", "*fp32"): 198,
    ("fp8_row", "*fp32"): 121,
    ("fp8_1x128", "*bf16"): 101,
    ("mxfp8", "*fp32"): 121,
    ("mxfp8", "*bf16"): 101,
    ("mxfp4", "*fp32"): 81,
    ("mxfp4", "*bf16"): 62,
    ("nvfp4", "*fp32"): 84,
    ("nvfp4", "*bf16"): 65,
}


def compile_reduce(target, name, out="*fp32", **changed):
    """By default of 8 messages in rows, aligned, scaled."""
    return costs.compile_for(messages.reduce_configuration(name, out, **changed), target)


def compiled_ahead():
    calls = [partial(compile_reduce, "sm_90", *case) for case in BUDGETS]
    return calls + [partial(compile_representatives, target) for target in aot.TARGETS]


def compile_representatives(target):
    table = {"TABLE": True, "REST": 1, "LOOPED": True, "ACCUMULATE": True}
    return [
        compile_reduce(target, "mxfp8", "*bf16", REST=0, ALIGNED=False),
        compile_reduce(target, "mxfp4", "*bf16", **table),
        compile_reduce(target, "nvfp4", REST=0),
    ]


def elements_per_thread(format):
    groups = reduce_message_kernels.tile_groups(message_format(format))
    return groups * 128 // (reduce_message_kernels.NUM_WARPS * 32)


def faults(compiled, format):
    """What is wrong with the accesses of a kernel for Hopper, as a list of sentences."""
    elements = elements_per_thread(format)
    found = []
    for is_load, kind in ((True, "load"), (False, "store")):
        narrow = {access.bits for access in compiled.accesses if access.is_load == is_load}
        narrow -= {ACCESS_BITS} | (SCALE_BITS.get(format, set()) if is_load else set())
        found += [f"{kind} of {bits} bits" for bits in sorted(narrow)]
    wide = [access for access in compiled.accesses if access.is_load and access.bits >= ACCESS_BITS]
    wanted = WORLD * elements * message_format(format).element.stored_bits // ACCESS_BITS
    if len(wide) != wanted:
        found.append(f"{len(wide)} loads of 16 bytes, expected {wanted}")
    return found


@pytest.mark.parametrize("case", BUDGETS, ids=str)
def test_sum_of_eight_on_hopper(case):
    name, out = case
    gate = f"{name} -> {out[1:]} world {WORLD}"
    compiled, found = costs.measure_case("reduce_messages_", gate)
    assert found == []
    assert faults(compiled, name) == []
    assert path_cost(compiled, elements_per_thread(name)) <= BUDGETS[case]
    converted = "F2FP.F16.E4M3.UNPACK_B" in compiled.assembly
    assert converted == (name.startswith("fp8") or name in ("mxfp8", "nvfp4"))


@pytest.mark.parametrize(
    ("format", "out"),
    [("bf16", "*fp16"), ("fp8_1x128", "*fp32"), ("mxfp8", "*fp32"), ("mxfp4", "*bf16")],
    ids=str,
)
def test_table_loop_and_accumulation_keep_the_widths(format, out):
    """Any number of ranks: two before the loop and three in it are compiled."""
    changed = {"TABLE": True, "REST": 1, "LOOPED": True, "ACCUMULATE": True}
    compiled = compile_reduce("sm_90", format, out, **changed)
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 128
    elements = elements_per_thread(format)
    loads = [access.bits for access in compiled.accesses if access.is_load]
    of_messages = 5 * elements * message_format(format).element.stored_bits // ACCESS_BITS
    of_out = elements * (32 if out == "*fp32" else 16) // ACCESS_BITS
    assert loads.count(ACCESS_BITS) == of_messages + of_out
    # A thread's 8 bytes are an address.
    assert set(loads) == {ACCESS_BITS, 64} | SCALE_BITS.get(format, set())
    assert {access.bits for access in compiled.accesses if not access.is_load} == {ACCESS_BITS}


@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_target_compiles_without_spills(target):
    for compiled in compile_representatives(target):
        assert compiled.spill_bytes == 0
        assert compiled.registers > 0
        # Everything that counts elements or bytes of a message counts with 64 bits.
        assert re.findall(r"arith\.muli [^\n]*: i32", compiled.intermediate) == []


def test_gate_fails():
    """On memory that may begin anywhere, and on accesses that another format has."""
    unaligned = compile_reduce("sm_90", "fp8_1x128", ALIGNED=False)
    with pytest.raises(CountError, match="a store of 16 bytes"):
        path_cost(unaligned, elements_per_thread("fp8_1x128"))
    narrow = {access.bits for access in unaligned.accesses if access.is_load}
    assert narrow == {8}
    compiled = compile_reduce("sm_90", "mxfp4")
    assert "load of 8 bits" in faults(compiled, "fp16")
