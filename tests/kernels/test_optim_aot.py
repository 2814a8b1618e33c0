"""Compiles the optimizers and the norm for six GPUs, and holds the compiler to a gate.

On Hopper every access in the full path is 16 bytes wide, nothing spills, and the instructions an
element, those that find the tile and make its scalars included, stay within a budget: below it the
memory is the limit (28 bytes of AdamW at 3 TB/s leave time for 277, 4 bytes of a norm for 40). The
count is of final machine code with every slow path's preparation, more than any run takes.
"""

import re
from functools import partial

import pytest

from sidestream.kernels import aot, flat_adamw, flat_sgd, flat_tiles, norm, reference_optim
from sidestream.tests.kernels import costs

ACCESS_BITS = 128
MIN_INSTRUCTIONS = {"adamw": 60, "sgd": 10}
MAX_REGISTERS = 128
NAMES = {None: "none", "*u8": "e4m3"}
BYTES = {"*fp32": 4, "*bf16": 2, "*fp16": 2, "*u8": 1, None: 4}
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")

SHARED = {
    "param": "*fp32", "lr": "*fp32", "step": "*i32", "factor": "*fp32", "found_inf": "*i32",
    "numel": "i32", "tiles_at": "i32", "decay_high": "fp32", "decay_low": "fp32",
}  # fmt: skip
ADAMW = {
    "exp_avg": "*fp32", "exp_avg_sq": "*fp32", "powers": "*fp64", "weight": "fp32", "beta2": "fp32",
    "growth": "fp32", "eps": "fp32",
}  # fmt: skip
SGD = {"momentum_buffer": "*fp32", "momentum": "fp32", "growth": "fp32"}
KERNELS = {
    "adamw": (flat_adamw, flat_adamw._adamw_kernel, ADAMW, {"NEAR": True}),
    "sgd": (flat_sgd, flat_sgd._sgd_kernel, SGD, {"NESTEROV": True}),
}


def compile_optimizer(name, target, grad, compute, *, segments=True, types=(), **constexprs):
    _, kernel, own_signature, own_constexprs = KERNELS[name]
    optional = {"compute": compute}
    for argument, kind in (("compute_scale", "*fp32"), ("amax", "*i32")):
        optional[argument] = kind if compute == "*u8" else None
    for argument, kind in (("table", "*i64"), ("lr_scales", "*fp64"), ("weight_decays", "*fp32")):
        optional[argument] = kind if segments else None
    present = {argument: kind for argument, kind in optional.items() if kind is not None}
    absent = {argument: None for argument, kind in optional.items() if kind is None}
    return costs.compile_kernel(
        kernel,
        {**SHARED, **own_signature, "grad": grad, **present, **dict(types)},
        {
            **own_constexprs,
            **absent,
            "MAXIMIZE": True,
            "ALIGNED": True,
            "HARDWARE": target in costs.HARDWARE_FP8,
            "BLOCK": flat_tiles.block_numel(min(BYTES[grad], BYTES[compute])),
            **constexprs,
        },
        target,
        num_warps=flat_tiles.NUM_WARPS,
    )


def compile_chunk(target):
    return costs.compile_kernel(
        norm._chunk_kernel,
        {"table": "*i64", "tiles_at": "i32", "sums": "*fp32", "flags": "*i32"},
        {"CHUNK_BYTES": reference_optim.CHUNK_BYTES},
        target,
        num_warps=norm._NUM_WARPS,
    )


def compile_combine(target, found_inf):
    return costs.compile_kernel(
        norm._combine_kernel,
        {"norm": "*fp32", "sums": "*fp32", "flags": "*i32", "num_chunks": "i32"}
        | {"found_inf": found_inf},
        {"SQUARED": False},
        target,
        num_warps=norm._COMBINE_WARPS,
    )


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


def stretches(compiled, ends):
    """(global accesses of 16 bytes, instructions) of the code up to each of `ends` in turn."""
    instructions = _INSTRUCTION.findall(compiled.assembly)
    found, first = [], 0
    for index, instruction in enumerate(instructions):
        if instruction.split()[0] in ends:
            stretch = instructions[first : index + 1]
            wide = sum(bool(re.search(r"(LDG|STG)\.E\S*\.128", text)) for text in stretch)
            found.append((wide, len(stretch)))
            first = index + 1
    return found


def optimizer_instructions(name, compiled, grad, compute):
    """Instructions an element from the kernel's start to where the full tile's path exits."""
    module = KERNELS[name][0]
    wide, count = stretches(compiled, ["EXIT"])[0]
    assert wide == len(compiled.accesses_of(module._full_tile)), "another path exits first"
    block = flat_tiles.block_numel(min(BYTES[grad], BYTES[compute]))
    return count / (block / (flat_tiles.NUM_WARPS * 32))


VARIANTS = [("*bf16", "*bf16"), ("*bf16", None), ("*fp32", "*bf16"), ("*bf16", "*u8")]


def compiled_ahead():
    calls = [
        partial(compile_optimizer, name, "sm_90", *variant)
        for name in KERNELS
        for variant in VARIANTS
    ]
    for target in aot.TARGETS:
        calls.append(partial(compile_optimizer, "adamw", target, "*bf16", "*bf16"))
        calls.append(partial(compile_optimizer, "sgd", target, "*bf16", "*u8"))
        calls.append(partial(compile_chunk, target))
        calls.append(partial(compile_combine, target, "*i1"))
    return calls


@pytest.mark.parametrize(("grad", "compute"), VARIANTS, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_optimizers_on_hopper(name, grad, compute):
    """With a table of segments, which only adds to the work, and once without."""
    for segments in (True, False)[: 1 + (grad == compute == "*bf16")]:
        compiled = compile_optimizer(name, "sm_90", grad, compute, segments=segments)
        assert faults(compiled, KERNELS[name][0]._full_tile) == []
        count = optimizer_instructions(name, compiled, grad, compute)
        # Fewer than one a formula's operation: the count would be of something else.
        assert count > MIN_INSTRUCTIONS[name]
        case = f"{NAMES.get(grad, grad[1:])} -> {NAMES.get(compute) or compute[1:]}"
        case += "" if segments else " one segment"
        assert costs.measure(f"flat_{name}_", case, compiled, count) == []


def test_norm_on_hopper():
    compiled = compile_chunk("sm_90")
    assert faults(compiled, norm._full_chunk) == []
    full = [found for found in stretches(compiled, ["BRA", "EXIT"]) if found[0]]
    rows = reference_optim.CHUNK_BYTES // 4 // reference_optim.CHUNK_LANES
    lanes = reference_optim.CHUNK_LANES // (norm._NUM_WARPS * 32)
    assert [wide for wide, _ in full] == [2 * rows] * 3, "paths are not apart"
    counts = [count / (rows * lanes) for _, count in full]
    # The paths are in no order that matters: the one with half of the elements has most for each.
    wide, *half = sorted(counts, reverse=True)
    half = [count / 2 for count in half]
    assert costs.measure("l2_norm_", "fp32", compiled, wide) == []
    assert costs.measure("l2_norm_", "half", compiled, max(half)) == []


@pytest.mark.parametrize("target", aot.TARGETS)
def test_all_targets_compile_without_spills(target):
    compiled = [
        compile_optimizer("adamw", target, "*bf16", "*bf16"),
        compile_optimizer("sgd", target, "*bf16", "*u8"),
        compile_chunk(target),
        compile_combine(target, "*i1"),
    ]
    for one in compiled:
        assert one.spill_bytes == 0
        assert 0 < one.registers <= MAX_REGISTERS


def test_a_first_beta_below_one_half_compiles():
    compiled = compile_optimizer("adamw", "sm_90", "*fp32", "*u8", segments=False, NEAR=False)
    assert faults(compiled, flat_adamw._full_tile) == []


@pytest.mark.parametrize(("found_inf", "step"), [("*i1", "*i64"), ("*fp32", "*fp32")])
def test_scalars_of_other_dtypes_compile(found_inf, step):
    assert compile_combine("sm_90", found_inf).spill_bytes == 0
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
