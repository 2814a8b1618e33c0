"""What a rate is held against: the fastest of several ways to move as many bytes.

    copy    half of the bytes are read, half are written: torch's `copy_`, on a GPU a memcpy
    read    all of them are read: torch's sum; for what writes next to nothing
    Triton  on a GPU a kernel of a few lines beside either, since memcpy is often not the fastest

They move what a case moves, each in as many places as the case's operands lie in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

Run = Callable[[], object]

COPY, TRITON_COPY = "copy", "Triton copy"
READ, TRITON_READ = "read", "Triton read"
BASELINES = (COPY, TRITON_COPY, READ, TRITON_READ)
# Whole accesses of 16 bytes, and Triton knows of 16 elements that they are.
_MULTIPLE = 16


def copies(num_bytes: int, device: torch.device, count: int) -> Mapping[str, Sequence[Run]]:
    """Ways to copy that move `num_bytes` a call, each in `count` places."""
    half = _numel(num_bytes // 2)
    sources = [torch.ones(half, device=device) for _ in range(count)]
    targets = [torch.ones_like(source) for source in sources]
    places = list(zip(targets, sources, strict=True))
    found: dict[str, Sequence[Run]] = {COPY: [_bound(torch.Tensor.copy_, *one) for one in places]}
    if device.type == "cuda":
        from .bandwidth_kernels import copy_

        found[TRITON_COPY] = [_bound(copy_, *one) for one in places]
    return found


def reads(num_bytes: int, device: torch.device, count: int) -> Mapping[str, Sequence[Run]]:
    """Ways to read `num_bytes` a call, each in `count` places."""
    sources = [torch.ones(_numel(num_bytes), device=device) for _ in range(count)]
    found: dict[str, Sequence[Run]] = {READ: [_bound(torch.sum, source) for source in sources]}
    if device.type == "cuda":
        from .bandwidth_kernels import num_programs, read_

        sums = torch.empty(num_programs(sources[0]), device=device)
        found[TRITON_READ] = [_bound(read_, sums, source) for source in sources]
    return found


def _numel(num_bytes: int) -> int:
    """FP32 elements of about as many bytes."""
    return max(1, num_bytes // 4 // _MULTIPLE) * _MULTIPLE


def _bound(function: Callable[..., object], *tensors: torch.Tensor) -> Run:
    return lambda: function(*tensors)
