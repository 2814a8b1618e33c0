"""Compiles the optimizers and the norm for six GPUs, and holds the compiler to a gate.

On Hopper every access in the full path is 16 bytes wide, nothing spills, and the instructions an
element, those that find the tile and make its scalars included, stay within a budget: below it the
memory is the limit (28 bytes of AdamW at 3 TB/s leave time for 277, 4 bytes of a norm for 40). The
count is of final machine code with every slow path's preparation, more than any run takes.
"""

from functools import partial

import pytest

from sidestream.kernels import ahead
from sidestream.kernels.ahead import compile as aot
from sidestream.kernels.ahead import optimizers
from sidestream.kernels.ahead.count import stretches
from sidestream.kernels.ahead.optimizers import KERNELS, NAMES, VARIANTS
from sidestream.kernels.optim import adamw as flat_adamw
from sidestream.kernels.optim import norm
from sidestream.tests.kernels import costs

ACCESS_BITS = 128
MIN_INSTRUCTIONS = {"adamw": 60, "sgd": 10}
MAX_REGISTERS = 128


def compile_optimizer(name, target, grad, compute, **options):
    configuration = optimizers.optimizer_configuration(name, grad, compute, **options)
    return costs.compile_for(configuration, target)


def compile_norm(target):
    configurations = (optimizers.largest_configuration(), optimizers.squares_configuration())
    return [costs.compile_for(configuration, target) for configuration in configurations]


def faults(compiled, *full_functions):
    """What the gate finds wrong but for instructions, as a list of sentences."""
    accesses = compiled.accesses_of(*full_functions)
    found = [
        f"{'load' if access.is_load else 'store'} of {access.bits} bits at line {access.line}"
        for access in accesses
        if access.bits < ACCESS_BITS
    ]
    if not accesses:
        found.append("no access in the full path: the gate sees nothing")
    if compiled.spill_bytes:
        found.append(f"{compiled.spill_bytes} bytes spilled")
    if compiled.registers > MAX_REGISTERS:
        found.append(f"{compiled.registers} registers")
    return found


def compiled_ahead():
    calls = [
        partial(compile_optimizer, name, "sm_90", *variant)
        for name in KERNELS
        for variant in VARIANTS
    ]
    for target in aot.TARGETS:
        calls.append(partial(compile_optimizer, "adamw", target, "*bf16", "*bf16"))
        calls.append(partial(compile_optimizer, "sgd", target, "*bf16", "*u8"))
        calls.append(partial(compile_norm, target))
    return calls


@pytest.mark.parametrize(("grad", "compute"), VARIANTS, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_optimizers_on_hopper(name, grad, compute):
    """With a table of segments, which only adds to the work, and once without."""
    for segments in (True, False)[: 1 + (grad == compute == "*bf16")]:
        case = f"{grad[1:]} -> {NAMES.get(compute) or compute[1:]}"
        case += "" if segments else " one segment"
        compiled, found = costs.measure_case(f"flat_{name}_", case)
        assert found == []
        assert faults(compiled, KERNELS[name][0]._full_tile) == []
        first, _ = stretches(compiled, ("EXIT",))[0]
        full = compiled.accesses_of(KERNELS[name][0]._full_tile)
        assert first == len(full), "another path exits first"
        # Fewer than one a formula's operation: the count would be of something else.
        count = ahead.case_of(f"flat_{name}_", case).instructions(compiled)
        assert count > MIN_INSTRUCTIONS[name]


@pytest.mark.parametrize("dtype", ["fp32", "half"])
def test_norm_on_hopper(dtype):
    for case, function in (
        (dtype, norm._aligned_squares),
        (f"{dtype} largest", norm._full_largest),
    ):
        compiled, found = costs.measure_case("l2_norm_", case)
        assert found == []
        assert faults(compiled, function) == []


@pytest.mark.parametrize("target", aot.TARGETS)
def test_all_targets_compile_without_spills(target):
    compiled = [
        compile_optimizer("adamw", target, "*bf16", "*bf16"),
        compile_optimizer("sgd", target, "*bf16", "*u8"),
        *compile_norm(target),
    ]
    for one in compiled:
        assert one.spill_bytes == 0
        assert 0 < one.registers <= MAX_REGISTERS


def test_a_first_beta_below_one_half_compiles():
    compiled = compile_optimizer("adamw", "sm_90", "*fp32", "*u8", segments=False, NEAR=False)
    assert faults(compiled, flat_adamw._full_tile) == []


@pytest.mark.parametrize(("found_inf", "step"), [("*i1", "*i64"), ("*fp32", "*fp32")])
def test_scalars_of_other_dtypes_compile(found_inf, step):
    types = {"found_inf": found_inf, "step": step, "lr": "*fp64"}
    for name in KERNELS:
        compiled = compile_optimizer(name, "sm_90", "*fp32", None, segments=False, types=types)
        assert compiled.spill_bytes == 0


def test_exact_arithmetic_is_in_the_machine_code():
    """No approximate division or root, no contraction: fused operations are the division's own."""
    compiled = compile_optimizer("adamw", "sm_90", "*bf16", "*bf16")
    assert "math.fma" not in compiled.intermediate
    assert "tt.precise_divf" in compiled.intermediate
    assert "tt.precise_sqrt" in compiled.intermediate


def test_the_gate_fails_on_narrow_accesses_and_blindness():
    masked = compile_optimizer("adamw", "sm_90", "*bf16", "*bf16", ALIGNED=False)
    assert any("sees nothing" in fault for fault in faults(masked, flat_adamw._full_tile))
    assert any("of 16 bits" in fault for fault in faults(masked, flat_adamw._masked_tile))
