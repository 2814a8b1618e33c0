"""Kernels that read their number from memory, compiled: within the gates of those given it."""

import dataclasses

import pytest
import torch

from sidestream.kernels import quantize_mx_with_transpose, quantize_nvfp4_with_transpose
from sidestream.kernels.ahead.compile import TARGETS, compile_launch
from sidestream.kernels.ahead.measure import faults
from sidestream.kernels.cases import case_of
from sidestream.kernels.launch import recorded
from sidestream.kernels.op import launching_on_cpu

NUMBERS = {"seed": torch.empty(1, dtype=torch.int64), "scale": torch.empty(1)}
# Keys of the rounds, which follow from a seed that is loaded, take registers of every thread.
MIN_REGISTERS = 72
CASES = (
    ("cast_", "e4m3 from bf16 stochastic"),
    ("quantize_mx_", "e2m1 from bf16 stochastic"),
    ("quantize_nvfp4_", "from bf16 stochastic"),
    ("pack_message_", "mxfp8 from bf16 stochastic"),
    ("reduce_messages_", "mxfp4 to bf16 world 8 scaled"),
)
# The quickest to compile, with a seed and with a scale, are measured every time.
QUICK = CASES[3:]
GATED = [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
ELSEWHERE = (
    *CASES,
    ("pack_", "bf16 to fp32 scaled accumulate"),
    ("reduce_", "bf16 to fp32 world 8 scaled accumulate"),
)


def reading(op, name, target):
    """The case, and the kernel that it would launch, compiled to read its numbers."""
    case = case_of(op, name)
    launch = case.launches()[case.counted]
    read = {key: NUMBERS[key] for key in NUMBERS if launch.arguments.get(key) is not None}
    assert read
    launch = dataclasses.replace(launch, arguments={**launch.arguments, **read})
    return case, launch, compile_launch(launch, target)


@pytest.mark.parametrize(("op", "name"), GATED, ids=map(" ".join, CASES))
def test_within_the_gate_on_hopper(op, name):
    case, launch, made = reading(op, name, "sm_90")
    numel = case.elements_per_thread(launch)
    path = case.count(made.instructions, case.moved_bytes * numel)
    gate = dataclasses.replace(case.gate, registers=max(case.gate.registers, MIN_REGISTERS))
    assert (
        faults(
            gate,
            instructions=path.instructions / numel,
            registers=made.registers,
            spill_bytes=made.spill_bytes,
        )
        == []
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in TARGETS if target != "sm_90"])
@pytest.mark.parametrize(("op", "name"), ELSEWHERE, ids=map(" ".join, ELSEWHERE))
def test_no_kernel_spills_elsewhere(op, name, target):
    _, _, made = reading(op, name, target)
    assert made.spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(
    "quantize", [quantize_mx_with_transpose, quantize_nvfp4_with_transpose], ids=["mx", "nvfp4"]
)
def test_nothing_spills_where_groups_of_noise_begin_anywhere(quantize, target):
    """Of elements whose first has any index, so that eight of them may have noise of two groups."""
    noise = {"rounding": "stochastic", "seed": NUMBERS["seed"], "first_index": 5}
    with launching_on_cpu(), recorded() as launches:
        quantize(torch.empty(128, 256, dtype=torch.bfloat16), **noise)
    assert compile_launch(launches[-1], target).spill_bytes == 0
