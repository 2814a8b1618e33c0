"""Every gated case compiled for Hopper and held to its gate; some for the other targets and held to
what was last counted there.

`TASKS` are compiled beside the tests as well, from their end.
"""

import re

import pytest

from sidestream.kernels.ahead import counted, measure
from sidestream.kernels.ahead.compile import HARDWARE_OF, TARGETS
from sidestream.kernels.ahead.count import WIDE_BITS
from sidestream.kernels.ahead.machines import occupancy
from sidestream.kernels.case import GATED_TARGET
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
    ("cast_", "e4m3fnuz from bf16"),
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
    ("quantize_fp8_grouped_", "e4m3 from bf16"),
    ("quantize_mx_grouped_", "e2m1 from bf16 stochastic"),
    ("quantize_nvfp4_grouped_", "from bf16 stochastic"),
    ("pack_message_", "nvfp4 from bf16 stochastic"),
    ("unpack_message_", "mxfp8 to bf16"),
    ("reduce_messages_", "mxfp4 to bf16 world 8 scaled"),
    ("reduce_peer_messages_", "nvfp4 to fp32 world 8"),
    ("flat_adamw_", "bf16 to e4m3 all options"),
    ("flat_adamw_", "fp32 to none"),
    ("flat_sgd_", "bf16 to e4m3 all options"),
    ("l2_norm_", "of bf16"),
    ("quantize_mx_with_transpose_", "e4m3 from bf16 stochastic swizzled"),
    ("quantize_nvfp4_with_transpose_", "from bf16 hadamard stochastic swizzled"),
    ("amax_nvfp4_with_transpose_", "of bf16"),
    ("quantize_fp8_with_transpose_", "delayed from bf16"),
)
OTHERS = [target for target in TARGETS if target.startswith("sm_") and target != "sm_90"]
# Each on AMD, and by turns on one of the others.
ELSEWHERE = [
    (*case, target)
    for at, case in enumerate(EACH_KERNEL)
    for target in ("gfx942", OTHERS[at % len(OTHERS)])
]
# What Blackwell's conversions are for: instructions an element.
BLACKWELL = (("quantize_mx_", "e2m1 from bf16", 7.0), ("quantize_nvfp4_", "from bf16", 9.0))
FP4_SUMS = [
    ("reduce_messages_", f"{form} to {dtype} world 8 scaled")
    for form in ("mxfp4", "nvfp4")
    for dtype in ("fp32", "bf16")
]
FP4 = [
    (case.op, case.name, target)
    for case in GATED
    for target in ("sm_100", "sm_120")
    if re.search("e2m1|fp4", case.op + case.name)
]
TASKS = [
    *((case.op, case.name, GATED_TARGET) for case in GATED),
    *ELSEWHERE,
    *((op, name, "sm_100") for op, name, _ in BLACKWELL),
    (*FP4_SUMS[0], "sm_100"),
]
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
    found = measure.measure(case, GATED_TARGET)
    assert found.faults(case.gate) == []
    if LOOPED in case.name:
        assert found.instructions is None
        return
    # All but the scales; and the first of two passes, which reads alone, is another kernel's.
    wide = 0.9 if case.passes == 1 else 0.9 - 2 / 5
    assert found.wide_bytes >= wide * case.moved_bytes
    assert found.instructions > 1


@pytest.mark.parametrize(("op", "name", "target"), ELSEWHERE, ids=map(" ".join, ELSEWHERE))
def test_no_kernel_spills_elsewhere_or_takes_more_than_was_counted(op, name, target):
    case = case_of(op, name)
    found = measure.measure(case, target)
    assert found.faults(counted.gate_of(case, target)) == []
    assert 0 < found.registers <= 255
    assert found.load_bits


@pytest.mark.slow
@pytest.mark.parametrize(("op", "name", "target"), FP4, ids=map(" ".join, FP4))
def test_fp4_takes_no_more_than_was_counted_on_blackwell(op, name, target):
    case = case_of(op, name)
    gate = counted.gate_of(case, target)
    assert gate is not None
    assert measure.measure(case, target).faults(gate) == []


@pytest.mark.parametrize(("op", "name", "limit"), BLACKWELL, ids=str)
def test_blackwell_converts_to_fp4_by_its_instruction(op, name, limit):
    found = measure.measure(case_of(op, name), "sm_100")
    assert found.instructions <= limit
    assembly = compiled(op, name, "sm_100").assembly
    assert "F2FP.SATFINITE.E2M1.F32" in assembly


@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(*one, marks=[pytest.mark.slow] * (at > 0), id=one[1])
        for at, one in enumerate(FP4_SUMS)
    ],
)
def test_sums_of_fp4_leave_a_third_of_blackwell_s_warps_resident(op, name):
    found = measure.measure(case_of(op, name), "sm_100")
    assert occupancy("sm_100", found.registers, found.shared_bytes, found.num_warps) > 0.35


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


@pytest.mark.parametrize("target", ["sm_89", "sm_90", "sm_100", "sm_120"])
def test_fp8_is_converted_by_the_hardware_from_hopper_on(target):
    assembly = compiled("quantize_mx_", "e4m3 from bf16", target).assembly
    is_there = HARDWARE_OF[target] > 0
    assert ("F2FP.SATFINITE.E4M3" in assembly) == is_there
    if is_there:  # the interpreter's maxima are others: none here may drop a NaN
        assert set(re.findall(r"FMNMX[^ ]*", assembly)) <= {"FMNMX.NAN", "FMNMX3.NAN"}


@pytest.mark.parametrize(
    ("op", "name", "numbers"),
    [
        ("quantize_mx_with_transpose_", "e4m3 from bf16", 0),
        ("quantize_nvfp4_with_transpose_", "from bf16 hadamard stochastic swizzled", 2),
    ],
    ids=["mx", "nvfp4"],
)
def test_a_matrix_is_read_once_for_both_sides(op, name, numbers):
    """Each of a thread's 64 elements of BF16, 16 bytes at a time; and the amaxes."""
    instructions = compiled(op, name, "sm_90").instructions
    loads = [step.access.bits for step in instructions if step.access and step.access.is_load]
    assert sorted(loads) == [32] * numbers + [128] * 8


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
