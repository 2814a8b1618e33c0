"""Owns the cases of wire messages in `make gpu-check`: packed, unpacked, summed over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..kernels import (
    message_layout,
    pack_message_,
    reduce_messages_,
    reduce_peer_messages_,
    registry,
    unpack_message_,
)
from .gpu_case import OURS, Case, same

PACKED = ("bf16", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
SUMMED = ("bf16", "fp8_row", "mxfp8", "mxfp4", "nvfp4")
WORLD = 8
CHECKED_NUMEL = 8192
FP4 = ("mxfp4", "nvfp4")


def cases(device: torch.device, shapes: Sequence[tuple[int, ...]], numel: int) -> Iterator[Case]:
    """One at a time: gradients of these shapes; sums of messages that have `numel` in all."""
    for name in PACKED:
        yield _pack_case(device, shapes, name)
    yield _unpack_case(device, shapes, "mxfp8")
    for name in SUMMED:
        yield _reduce_case(device, numel // WORLD // CHECKED_NUMEL * CHECKED_NUMEL, name)


def _message(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    layout = message_layout(name, [tensor.numel() for tensor in tensors])
    message = torch.empty(layout.num_bytes, dtype=torch.uint8, device=tensors[0].device)
    pack_message_(message, tensors, name)
    return message


def _pack_case(device: torch.device, shapes: Sequence[tuple[int, ...]], name: str) -> Case:
    tensors = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    message = _message(tensors, name)
    few = [tensor[:3] for tensor in tensors]
    return Case(
        name=f"pack_message bf16 -> {name}",
        num_bytes=2 * sum(tensor.numel() for tensor in tensors) + message.numel(),
        candidates={OURS: lambda: pack_message_(message, tensors, name)},
        agrees=lambda: same(
            (_message(few, name),), (_message([tensor.cpu() for tensor in few], name),)
        ),
        target=registry.target_share("pack_message_", fp4=name in FP4),
    )


def _unpack_case(device: torch.device, shapes: Sequence[tuple[int, ...]], name: str) -> Case:
    tensors = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    message = _message(tensors, name)

    def agrees() -> bool:
        expected = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in few]
        found = [torch.empty_like(tensor) for tensor in few]
        small = _message(few, name)
        unpack_message_(found, small, name)
        unpack_message_(expected, small.cpu(), name)
        return same(found, expected)

    few = [tensor[:3] for tensor in tensors]
    return Case(
        name=f"unpack_message {name} -> bf16",
        num_bytes=2 * sum(tensor.numel() for tensor in tensors) + message.numel(),
        candidates={OURS: lambda: unpack_message_(tensors, message, name)},
        agrees=agrees,
        target=registry.target_share("unpack_message_"),
    )


def _reduce_case(device: torch.device, numel: int, name: str) -> Case:
    numel = max(numel, CHECKED_NUMEL)
    messages = torch.stack(
        [_message([torch.randn(numel, device=device).bfloat16()], name) for _ in range(WORLD)]
    )
    out = torch.empty(numel, device=device)
    few = torch.stack(
        [_message([torch.randn(CHECKED_NUMEL, device=device)], name) for _ in range(WORLD)]
    )

    def agrees() -> bool:
        found, expected = (torch.empty(CHECKED_NUMEL, device=at) for at in (device, "cpu"))
        reduce_messages_(found, few, name)
        reduce_messages_(expected, few.cpu(), name)
        return same((found,), (expected,))

    return Case(
        name=f"reduce_messages world {WORLD} {name}",
        num_bytes=messages.numel() + 4 * numel,
        candidates={
            OURS: lambda: reduce_messages_(out, messages, name),
            "by addresses": lambda: reduce_peer_messages_(out, list(messages), name),
        },
        agrees=agrees,
        target=registry.target_share("reduce_messages_"),
    )
