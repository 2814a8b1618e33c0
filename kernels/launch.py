"""How kernels are launched: how much a program handles, with how many warps, and the launch itself.

A thread moves at most 16 bytes an access before Blackwell, so a program of `num_warps` warps takes

    block bytes = num_warps * 32 threads * 16 bytes * accesses in flight

of the narrowest data it touches: then every wider side is 16 bytes an access too. Bytes in flight
hide latency; at 3 TB/s and 0.7 us they are about 16 KiB a multiprocessor. pack_ keeps two accesses
of the tensor in flight. reduce_ has one row per rank in flight already and takes two accesses a
row only for small worlds, so that registers stay few.

A warp of an AMD GPU has 64 threads, and each takes half of that: 8 bytes an access in reduce_ for
large worlds, and of a 16-bit flat buffer for FP32 tensors.

A launcher asks `tuned.config_for` for the configuration, and hands all to `launch`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .op import on_first_use

ACCESS_BYTES = 16
THREADS_PER_WARP = 32
HARDWARE = "HARDWARE"
"""The constant of kernels that convert formats: which of them the GPU has instructions for."""

FP8, FP4 = 1, 2
"""What HARDWARE may be: FP8's instructions, and FP4's too; 0: all is arithmetic."""

_HOPPER = (9, 0)
# sm_100a, sm_103a, sm_110a, sm_120a and sm_121a: ptxas refuses FP4's instructions for all others.
_WITH_FP4 = frozenset({(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)})
_as_compiled = on_first_use("portable", "as_compiled")
_NO_GUARD = contextlib.nullcontext()  # to make one anew takes 0.3 us


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How one kernel is launched: bytes of its narrowest data a program takes, and its warps."""

    block_bytes: int
    num_warps: int

    def __post_init__(self) -> None:
        for name in ("block_bytes", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: expected a power of two, got {value}; round it up")


def config_of(*, num_warps: int, accesses: int) -> LaunchConfig:
    """So large a block that each thread has so many accesses of 16 bytes."""
    return LaunchConfig(num_warps * THREADS_PER_WARP * ACCESS_BYTES * accesses, num_warps)


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether all start where 16 bytes may be accessed at once."""
    return not any(tensor.data_ptr() % ACCESS_BYTES for tensor in tensors)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the current stream of `device`, the current one."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def device_guard(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current one, where Triton launches; nothing for CPUs."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return _NO_GUARD


def hardware_of(capability: tuple[int, int]) -> int:
    """What HARDWARE is on NVIDIA's GPUs of this compute capability: FP8 from Hopper on.

    Ada (8, 9) has the instructions, but Triton 3.6 goes by way of FP16 there and rounds twice.
    """
    if capability in _WITH_FP4:
        return FP4
    return FP8 if capability >= _HOPPER else 0


@functools.cache
def hardware_on(device: torch.device) -> int:
    """What HARDWARE is on `device`: 0 on AMD's, and on a CPU, where kernels are interpreted."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return hardware_of(torch.cuda.get_device_capability(device))


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as it was asked for: all that a compiler needs, and the grid.

    arguments: those of the kernel that are no constants, by name. constants: what it is compiled
    for, but for HARDWARE, which follows from the GPU.
    """

    kernel: Any
    programs: int
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int


_records: list[list[Launch]] = []


def launch(
    kernel: Any, programs: int, *arguments: Any, on: torch.Tensor, num_warps: int, **constants: Any
) -> None:
    """Launch a JIT function on the GPU of `on`, one program after the other along one axis.

    arguments: the kernel's, in its order; constants: the rest. HARDWARE is found out here. No
    multiply-add is fused: a fused one rounds once where the definitions round twice.
    """
    if _records:
        names = kernel.arg_names
        named = dict(zip(names, arguments, strict=False))
        _records[-1].append(Launch(kernel, programs, named, constants, num_warps))
        return
    if HARDWARE in kernel.arg_names:
        constants[HARDWARE] = hardware_on(on.device)
    arguments = _as_compiled(arguments)
    with device_guard(on.device):
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within the block nothing is launched: what would have been is in the list of the innermost.

    It holds for the whole process, so for one thread at a time.
    """
    record: list[Launch] = []
    _records.append(record)
    try:
        yield record
    finally:
        _records.pop()
