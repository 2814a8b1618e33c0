"""Every gated case compiled for Hopper and held to its gate; some for the other targets, unspilled.

`TASKS` are compiled beside the tests as well, from their end.
"""

import re

import pytest

from sidestream.kernels.ahead import measure
from sidestream.kernels.ahead.compile import HARDWARE_FP8, TARGETS
from sidestream.kernels.ahead.count import WIDE_BITS
from sidestream.kernels.cases import case_of, cases
from sidestream.tests.kernels.compiling import compiled

GATED = [case for case in cases() if case.gate is not None]
# One of every kernel, with the options that make most of it.
EACH_KERNEL = (
    ("pack_", "bf16 to fp32 scaled accumulate"),
    ("unpack_", "fp16 to bf16 scaled accumulate"),
    ("reduce_", "bf16 to fp32 world 8 scaled accumulate"),
    ("cast_", "e4m3 from fp32"),
    ("cast_", "e2m1 from bf16 stochastic"),
    ("cast_back_", "e2m1 to bf16"),
    ("quantize_fp8_", "uneven 1x128 from bf16"),
    ("quantize_fp8_", "128x128 from bf16"),
    ("quantize_fp8_", "tensor from bf16"),
    ("dequantize_fp8_", "uneven 128x128 to bf16"),
    ("update_fp8_scales_", "max of 16"),
    ("quantize_mx_", "e2m1 from bf16 stochastic swizzled"),
    ("dequantize_mx_", "e2m1 to bf16 swizzled"),
    ("amax_nvfp4_", "of fp32 hadamard"),
    ("quantize_nvfp4_", "from bf16 hadamard stochastic swizzled"),
    ("dequantize_nvfp4_", "to bf16 swizzled"),
    ("hadamard16_", "of fp32 inverse"),
    ("pack_message_", "nvfp4 from bf16 stochastic"),
    ("unpack_message_", "mxfp8 to bf16"),
    ("reduce_messages_", "mxfp4 to bf16 world 8 scaled"),
    ("reduce_peer_messages_", "nvfp4 to fp32 world 8"),
    ("flat_adamw_", "bf16 to e4m3 all options"),
    ("flat_adamw_", "fp32 to none"),
    ("flat_sgd_", "bf16 to e4m3 all options"),
    ("l2_norm_", "of bf16"),
)
OTHERS = [target for target in TARGETS if target.startswith("sm_") and target != "sm_90"]
# Each on AMD, and by turns on one of the others.
ELSEWHERE = [
    (*case, target)
    for at, case in enumerate(EACH_KERNEL)
    for target in ("gfx942", OTHERS[at % len(OTHERS)])
]
TASKS = [*((case.op, case.name, measure.GATED_TARGET) for case in GATED), *ELSEWHERE]
LOOPED = "world 64"
# Tensors of many sizes, so that what is left of tiles is compiled too.
MANY = 300_000
PHILOX = r"%c(?:-76\d+|-84\d+)\w*_i32"
FP64 = r"(?:@\S+ )?(?:D(?:ADD|MUL|FMA|SETP)|MUFU\.\w+64H|\w+\.F64)"
COUNTING = (
    ("pack_", "bf16 to fp32"),
    ("reduce_", "bf16 to fp32 world 2"),
    ("quantize_fp8_", "uneven 1x128 from bf16"),
    ("quantize_nvfp4_", "from bf16 torchao"),
    ("pack_message_", "fp8_1x128 from bf16"),
    ("pack_message_", "nvfp4 from bf16"),
    ("unpack_message_", "mxfp4 to bf16"),
    ("reduce_messages_", "nvfp4 to bf16 world 8 scaled"),
)


@pytest.mark.parametrize("case", GATED, ids=lambda case: case.full_name)
def test_within_its_gate_and_wide_on_hopper(case):
    found = measure.measure(case, measure.GATED_TARGET)
    assert found.faults(case.gate) == []
    if LOOPED in case.name:
        assert found.instructions is None
        return
    # All but the scales; and the first of two passes, which reads alone, is another kernel's.
    wide = 0.9 if case.passes == 1 else 0.9 - 2 / 5
    assert found.wide_bytes >= wide * case.moved_bytes
    assert found.instructions > 1


@pytest.mark.parametrize(("op", "name", "target"), ELSEWHERE, ids=map(" ".join, ELSEWHERE))
def test_no_kernel_spills_elsewhere(op, name, target):
    found = measure.measure(case_of(op, name), target)
    assert found.spill_bytes == 0
    assert 0 < found.registers <= 255
    assert found.load_bits


@pytest.mark.parametrize(("op", "name"), COUNTING, ids=map(" ".join, COUNTING))
def test_no_32_bit_product_counts_elements(op, name):
    """Of scalars; those of the lanes of a program stay below its block, and noise has its own."""
    made = compiled(op, name, "sm_90", MANY)
    assert made.spill_bytes == 0
    found = re.findall(r"arith\.muli [^\n]*: i32", made.intermediate)
    assert [product for product in found if not re.search(PHILOX, product)] == []


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_arithmetic_is_ieee_s(target):
    """No approximate division or root of FP32, no contraction: a division's own are fused."""
    for op, name in (
        ("quantize_fp8_", "1x128 from bf16"),
        ("flat_adamw_", "bf16 to bf16 all options"),
    ):
        text = compiled(op, name, target).intermediate
        assert "precise_divf" in text
        assert not re.search(r"(arith\.divf|math\.sqrt) [^\n]*: f32", text)
        assert "math.fma" not in text


@pytest.mark.parametrize("target", ["sm_89", *HARDWARE_FP8])
def test_fp8_is_converted_by_the_hardware_from_hopper_on(target):
    assembly = compiled("quantize_mx_", "e4m3 from bf16", target).assembly
    is_there = target in HARDWARE_FP8
    assert ("F2FP.SATFINITE.E4M3" in assembly) == is_there
    if is_there:  # the interpreter's maxima are others: none here may drop a NaN
        assert set(re.findall(r"FMNMX[^ ]*", assembly)) <= {"FMNMX.NAN", "FMNMX3.NAN"}


@pytest.mark.parametrize("op", ["flat_adamw_", "flat_sgd_"])
def test_a_step_finds_its_scalars_made(op):
    """On B300, whose FP64 is a 60th of FP32: none is left, and wide loads begin soon."""
    step = compiled(op, "bf16 to bf16 all options", "sm_103")
    texts = [instruction.text for instruction in step.instructions]
    assert [text for text in texts if re.match(FP64, text)] == []
    accesses = [instruction.access for instruction in step.instructions]
    assert next(at for at, one in enumerate(accesses) if one and one.bits == WIDE_BITS) < 100


def test_noise_is_shared_by_a_thread_s_elements():
    """Seven rounds an element would be 28 multiplications; 16 elements share them."""
    assembly = compiled("quantize_mx_", "e2m1 from bf16 stochastic", "sm_90").assembly
    multiplications = len(re.findall(r"IMAD\.(?:HI|WIDE)\.U32", assembly))
    assert 14 <= multiplications <= 2 * 14 * 2


@pytest.mark.parametrize("name", ["of bf16", "of fp32 inverse"])
def test_the_transform_loads_all_before_it_stores_any(name):
    """On every path, with a barrier between, so that it may be stored where it came from."""
    kinds = []
    for step in compiled("hadamard16_", name, "sm_90", MANY).instructions:
        if step.access is not None:
            kinds.append("load " if step.access.is_load else "store ")
        elif step.text.startswith("BAR.SYNC"):
            kinds.append("barrier ")
        elif step.jumps_to is not None or step.is_end:
            kinds.append("|")
    paths = [path for path in "".join(kinds).split("|") if path]
    assert len(paths) == 2
    for path in paths:
        assert re.fullmatch(r"(load )+(barrier )+(store )+", path)
