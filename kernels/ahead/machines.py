"""What is known of GPUs that are not here: limits of a multiprocessor, rates of products.

    occupancy   resident warps by the most there can be: by registers, shared memory and blocks
    prediction  of three times an element, the longest one:
                    bytes / copy rate
                    instructions / 32 / (4 a cycle * multiprocessors * clock)
                    integers / 32 / (2 a cycle * multiprocessors * clock)
    target      the smaller of the share of a copy that is asked for, and 0.85 of what the pipes
                leave, since none is ever full

The second is the rate at which warps can issue, the third that of the pipe for integers, logic and
conversions. Others have half of the first or less too (FP32 on an A100), so these times are lower
bounds: "instructions" and "integers" are sure, "bytes" is not.

Limits of multiprocessors: CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute
Capability"; how registers and shared memory are allotted: cuda_occupancy.h of CUDA 13.0.
The pipes' rates: the same guide, "Arithmetic Instructions"; sm_120 may have more for integers.
Multiprocessors, clocks, memory rates: NVIDIA's data sheets; clocks are the ones that their FP32
rate follows from, but for Hopper's. What a copy reaches, 3.0 TB/s on an H100 and 4.3 on an H200, is
0.90 of the data sheet's rate, and so it is taken for the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..launch import THREADS_PER_WARP

KIB = 1024
WARPS_A_CYCLE = 4
INTEGER_WARPS_A_CYCLE = 2
PIPE_SHARE = 0.85  # of a pipe's time that a target asks for
REGISTERS = 64 * KIB
REGISTER_UNIT = 256  # allotted to a warp at a time
PARTITIONS = 4  # of the registers; a warp's are in one
SHARED_UNIT = 128  # bytes
RESERVED_SHARED = KIB  # of each block, by CUDA
COPY_SHARE = 0.90
AMD_WAVES = 8  # of a SIMD: LLVM, "User Guide for AMDGPU Backend", gfx942


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor holds at most; `shared_bytes` of all blocks together."""

    warps: int
    blocks: int
    shared_bytes: int


MULTIPROCESSORS: Mapping[str, Multiprocessor] = {
    "sm_80": Multiprocessor(64, 32, 164 * KIB),
    "sm_89": Multiprocessor(48, 24, 100 * KIB),
    "sm_90": Multiprocessor(64, 32, 228 * KIB),
    "sm_100": Multiprocessor(64, 32, 228 * KIB),
    "sm_103": Multiprocessor(64, 32, 228 * KIB),
    "sm_120": Multiprocessor(48, 24, 100 * KIB),
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A product: what decides how fast it can move an element and work on it.

    memory_gb_s: of its data sheet. copy_gb_s: what a copy reaches.
    """

    name: str
    target: str
    multiprocessors: int
    clock_ghz: float
    memory_gb_s: float
    copy_gb_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What limits a kernel on a GPU, "bytes", "instructions" or "integers", and its part of a
    copy's rate.

    issued, integers: the time of all instructions, and that of the integers' pipe, by that of the
    bytes; the larger one is the bound where it is above 1.
    """

    gpu: str
    bound: str
    share: float
    issued: float
    integers: float

    def target(self, copy_share: float) -> float:
        """What a case is to reach here that is to reach `copy_share` where bytes are the bound."""
        return min(copy_share, PIPE_SHARE / max(self.issued, self.integers))


def _by_data_sheet(
    name: str, target: str, multiprocessors: int, clock_ghz: float, memory_gb_s: float
) -> Gpu:
    copy_gb_s = COPY_SHARE * memory_gb_s
    return Gpu(name, target, multiprocessors, clock_ghz, memory_gb_s, copy_gb_s)


GPUS: tuple[Gpu, ...] = (
    _by_data_sheet("A100", "sm_80", 108, 1.410, 2039),  # SXM, 80 GB
    _by_data_sheet("L40S", "sm_89", 142, 2.520, 864),
    _by_data_sheet("RTX4090", "sm_89", 128, 2.520, 1008),
    # The clock of the budgets in the tests: below the 1.98 GHz that the data sheet's rate needs.
    Gpu("H100", "sm_90", 132, 1.755, 3350, 3000),
    Gpu("H200", "sm_90", 132, 1.755, 4800, 4300),
    _by_data_sheet("B200", "sm_100", 148, 1.965, 8000),
    # Its sheet has B200's FP32 rate, multiprocessors times clock, which are not told apart there.
    _by_data_sheet("B300", "sm_103", 148, 1.965, 8000),
    _by_data_sheet("RTX5090", "sm_120", 170, 2.407, 1792),
)


# What may stand beside a product's name without changing what `Gpu` says of it; AC: air cooled.
_HARMLESS = re.compile(r"NVIDIA|GeForce|SXM\d?|AC|HBM\d\w*|\d+GB")


def gpus_of(target: str) -> tuple[Gpu, ...]:
    """The products that code for `target` runs on."""
    return tuple(gpu for gpu in GPUS if gpu.target == target)


def gpu_of(device: str) -> Gpu | None:
    """The product by the name that CUDA gives it; `None` where nothing is known of it, such as of a
    laptop's, or of a part of one.
    """
    words = re.split(r"[\s-]+", device.strip())
    left = [word for word in words if not _HARMLESS.fullmatch(word)]
    return next((gpu for gpu in GPUS if gpu.name == "".join(left)), None)


def occupancy(target: str, registers: int, shared_bytes: int, num_warps: int) -> float:
    """Resident warps by the most there can be, of blocks of `num_warps` warps on NVIDIA's `target`.

    0 where not even one block fits.
    """
    limits = MULTIPROCESSORS[target]
    per_warp = _round_up(max(registers, 1) * THREADS_PER_WARP, REGISTER_UNIT)
    by_registers = PARTITIONS * (REGISTERS // PARTITIONS // per_warp) // num_warps
    by_shared = limits.shared_bytes // _round_up(shared_bytes + RESERVED_SHARED, SHARED_UNIT)
    blocks = min(limits.blocks, limits.warps // num_warps, by_registers, by_shared)
    return blocks * num_warps / limits.warps


def predict(gpu: Gpu, moved_bytes: float, instructions: float, integers: float) -> Prediction:
    """What an element costs on `gpu`, when it moves these bytes and a thread has to execute these
    instructions, `integers` of them by the pipe of integers.
    """
    bytes_ns = moved_bytes / gpu.copy_gb_s
    a_nanosecond = THREADS_PER_WARP * gpu.multiprocessors * gpu.clock_ghz
    times = {
        "instructions": instructions / (WARPS_A_CYCLE * a_nanosecond) / bytes_ns,
        "integers": integers / (INTEGER_WARPS_A_CYCLE * a_nanosecond) / bytes_ns,
    }
    bound = max(times, key=lambda pipe: times[pipe])
    longest = times[bound]
    return Prediction(
        gpu.name, bound if longest > 1 else "bytes", 1 / max(1, longest), *times.values()
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
