"""Owns the choice of launch configurations: how much a program handles, and with how many warps.

A thread moves at most 16 bytes an access before Blackwell, so a program of `num_warps` warps takes

    block bytes = num_warps * 32 threads * 16 bytes * accesses in flight

of the narrowest data it touches: then every wider side is 16 bytes an access too. Bytes in flight
hide latency; at 3 TB/s and 0.7 us they are about 16 KiB a multiprocessor. pack_ keeps two accesses
of the tensor in flight. reduce_ has one row per rank in flight already and takes two accesses a
row only for small worlds, so that registers stay few.

A warp of an AMD GPU has 64 threads, and each takes half of that: 8 bytes an access in reduce_ for
large worlds, and of a 16-bit flat buffer for FP32 tensors.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch

ACCESS_BYTES = 16
THREADS_PER_WARP = 32
SMALL_WORLD = 4


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


@functools.cache
def pack_config() -> LaunchConfig:
    """For pack_ and unpack_. The block is of one tensor, so its elements follow from the dtype."""
    return _config(num_warps=8, accesses=2)


def pack_case(flat: str, accumulate: bool) -> str:
    """The case of pack_ and unpack_ that a table knows: by the dtype of the flat buffer."""
    return flat + " accumulate" * accumulate


@functools.cache
def reduce_config(world_size: int) -> LaunchConfig:
    """For reduce_ over `world_size` rows. The block is of the narrower of a row and the result."""
    return _config(num_warps=4, accesses=2 if world_size <= SMALL_WORLD else 1)


def reduce_case(part: str, world_size: int) -> str:
    """The case of `reduce_` that a table knows: by the dtype of the rows, and few or many."""
    return f"{part} {'few' if world_size <= SMALL_WORLD else 'many'} ranks"


def _config(num_warps: int, accesses: int) -> LaunchConfig:
    return LaunchConfig(num_warps * THREADS_PER_WARP * ACCESS_BYTES * accesses, num_warps)


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether all start where 16 bytes may be accessed at once."""
    return not any(tensor.data_ptr() % ACCESS_BYTES for tensor in tensors)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the current stream of `device`, the current one."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes the GPU of `tensor` the current one, where Triton launches; nothing for CPU tensors."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
