"""Compiles the message kernels for six GPUs: instructions an element on Hopper, widths, spills."""

import itertools
import re
from functools import partial

import pytest

from sidestream.kernels import message_decode, message_encode, message_kernels, message_tiles
from sidestream.kernels.message_layout import ALIGN_NUMEL, DEFAULT_ROW_NUMEL, message_format
from sidestream.tests.kernels import costs

ACCESS_BITS = 128
KINDS = {"fp32": 0, "bf16": 1, "fp16": 2, "mixed": message_tiles.MIXED}
PACK_COUNTS = ("tiles_at", "num_tiles", "header", "numel", "scales_at", "scales_end", "rows_at",
               "rows_end", "num_bytes")  # fmt: skip
# (format, dtype of the tensors, stochastic). While an H100 moves the bytes of BF16 to MXFP8 there
# is time for 30 instructions an element, to FP4 for 25, from FP32 to FP4 for 45.
PACK = [
    ("fp32", "bf16", False),
    ("bf16", "bf16", False),
    ("bf16", "fp32", False),
    ("bf16", "bf16", True),
    ("fp8_row", "bf16", False),
    ("fp8_1x128", "bf16", False),
    ("fp8_1x128", "bf16", True),
    ("mxfp8", "bf16", False),
    ("mxfp8", "bf16", True),
    ("mxfp4", "bf16", False),
    ("mxfp4", "bf16", True),
    ("mxfp4", "fp32", True),
    ("nvfp4", "bf16", False),
    ("nvfp4", "bf16", True),
]
UNPACK = [
    ("fp16", "fp16"),
    *(
        (name, "bf16")
        for name in ("fp32", "bf16", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
    ),
]
ELSEWHERE = ("bf16", "fp8_row", "mxfp4", "nvfp4")
PATHS = {"full": (True, False), "masked": (False, True), "both": (True, True)}


def options(target, name, kind, paths, tile):
    row_numel = DEFAULT_ROW_NUMEL if message_format(name).has_rows else ALIGN_NUMEL
    full, masked = PATHS[paths]
    return {
        "FORMAT": name,
        "ROW": row_numel,
        "HARDWARE": target in costs.HARDWARE_FP8,
        "KIND": KINDS[kind],
        "FULL": full,
        "MASKED": masked,
        "TILE": tile,
        "PART": message_tiles.part_numel(tile, row_numel),
    }


def compile_pack(target, case, paths="both", scaled=False):
    name, kind, stochastic = case
    signature = {"message": "*u8", "table": "*i64", **dict.fromkeys(PACK_COUNTS, "i64")}
    rule = message_kernels.scale_rule(name, "rceil", False)
    tile = message_kernels.tile_numel(name, stochastic)
    constexprs = {"RULE": rule} | options(target, name, kind, paths, tile)
    for argument, type_name, is_there in (("scale", "fp32", scaled), ("seed", "i64", stochastic)):
        (signature if is_there else constexprs)[argument] = type_name if is_there else None
    kernel = message_kernels._pack_kernel
    return costs.compile_kernel(
        kernel, signature, constexprs, target, num_warps=message_tiles.NUM_WARPS
    )


def compile_unpack(target, case, paths="both", scaled=False):
    signature = {"message": "*u8", "table": "*i64"}
    signature |= dict.fromkeys(("tiles_at", "scales_at", "rows_at"), "i64")
    constexprs = {"ACCUMULATE": scaled} | options(target, *case, paths, message_tiles.TILE_NUMEL)
    (signature if scaled else constexprs)["scale"] = "fp32" if scaled else None
    kernel = message_decode._unpack_kernel
    return costs.compile_kernel(
        kernel, signature, constexprs, target, num_warps=message_tiles.NUM_WARPS
    )


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


def cost(compiled, tile):
    return costs.path_cost(compiled, tile / (message_tiles.NUM_WARPS * 32))


@pytest.mark.parametrize("case", PACK, ids=str)
def test_pack_on_hopper(case):
    name, kind, stochastic = case
    compiled = compile_pack("sm_90", case, "full")
    found = cost(compiled, message_kernels.tile_numel(name, stochastic))
    gate = f"{name} from {kind}" + " stochastic" * stochastic
    assert costs.measure("pack_message_", gate, compiled, found) == []
    assert faults(compiled, [message_encode._loaded], True) == []
    stored = {access.bits for access in compiled.accesses if not access.is_load}
    assert ACCESS_BITS in stored
    converted = "F2FP.SATFINITE.E" in compiled.assembly
    assert converted == (name == "nvfp4" or ("fp8" in name and not stochastic))


@pytest.mark.parametrize("case", UNPACK, ids=str)
def test_unpack_on_hopper(case):
    name, kind = case
    compiled = compile_unpack("sm_90", case, "full")
    found = cost(compiled, message_tiles.TILE_NUMEL)
    assert costs.measure("unpack_message_", f"{name} to {kind}", compiled, found) == []
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
    loads = packed.accesses_of(message_encode._loaded)
    assert {access.bits for access in loads} >= {16, 32, ACCESS_BITS}


def test_gate_fails_on_masked_accesses():
    masked = compile_pack("sm_90", ("mxfp8", "bf16", False), "masked")
    assert faults(masked, [message_encode._loaded], True) == [
        "accesses of [16] bits to the tensors"
    ]
