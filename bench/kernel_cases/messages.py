"""Owns the cases of wire messages: packed from a Llama block, unpacked, summed over ranks.

A message's padding and header move as well and are counted. Rivals are there for BF16 alone, whose
message is what `torch.sum` and `_foreach_copy_` work on as well: the numbers, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...kernels import (
    BF16,
    FP8_1X128,
    MXFP4,
    MXFP8,
    NVFP4,
    message_layout,
    pack_message_,
    reduce_messages_,
    reduce_peer_messages_,
    registry,
    unpack_message_,
)
from ...kernels.formats.table import MESSAGES
from ...kernels.wire import (
    reference as reference_message,
)
from ...kernels.wire import (
    reference as reference_reduce_message,
)
from ...kernels.wire.layout import DEFAULT_ROW_NUMEL
from .case import DTYPES, Case, Operands, Run, block_numel, block_shapes

_FP4 = (MXFP4.name, NVFP4.name)
_PACKED = (BF16.name, FP8_1X128.name, MXFP8.name, MXFP4.name, NVFP4.name)
_SUMMED = (BF16.name, "fp8_row", MXFP8.name, MXFP4.name, NVFP4.name)
_SUMMED_BY_ADDRESS = (MXFP8.name,)
_SHARD_MULTIPLE = 1024  # a row of the formats that have rows


def cases(worlds: Sequence[int]) -> Iterator[Case]:
    """All, each for any size."""
    for form in MESSAGES:
        for dtype in DTYPES:
            yield _pack_case(dtype, form)
            yield _unpack_case(form, dtype)
        for world in worlds:
            yield _sum_case("reduce_messages_", reduce_messages_, form, world)
            yield _sum_case("reduce_peer_messages_", _reduce_peers_, form, world)


def _message(tensors: Sequence[torch.Tensor], form: str) -> torch.Tensor:
    layout = message_layout(form, [tensor.numel() for tensor in tensors])
    message = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=tensors[0].device)
    pack_message_(message, tensors, form)
    return message


def _message_bytes(form: str, numel: int) -> int:
    numels = [torch.Size(shape).numel() for shape in block_shapes(numel)]
    return message_layout(form, numels).num_bytes


def _pack_case(dtype: str, form: str) -> Case:
    source = DTYPES[dtype]

    def make(device: torch.device, numel: int) -> Operands:
        tensors = [torch.randn(shape, device=device).to(source) for shape in block_shapes(numel)]
        return Operands(read=tensors, written=[torch.zeros_like(_message(tensors, form))])

    def ours(operands: Operands) -> Run:
        tensors, (message,) = list(operands.read), operands.written
        return lambda: pack_message_(message, tensors, form)

    def definition(operands: Operands) -> None:
        tensors, (message,) = list(operands.read), operands.written
        layout = message_layout(form, [tensor.numel() for tensor in tensors])
        offsets = list(layout.offsets)
        reference_message.pack_message_(message, tensors, form, layout.numel, offsets, offsets)

    return Case(
        name=f"pack_message {dtype} -> {form}",
        op="pack_message_",
        format=form,
        dtype=dtype,
        numel=block_numel,
        num_bytes=lambda numel: block_numel(numel) * source.itemsize + _message_bytes(form, numel),
        make=make,
        ours=ours,
        definition=definition,
        target=registry.target_share("pack_message_", fp4=form in _FP4),
        standard=dtype == "bf16" and form in _PACKED,
    )


def _unpack_case(form: str, dtype: str) -> Case:
    wanted = DTYPES[dtype]

    def make(device: torch.device, numel: int) -> Operands:
        tensors = [torch.randn(shape, device=device).bfloat16() for shape in block_shapes(numel)]
        written = [torch.zeros_like(tensor, dtype=wanted) for tensor in tensors]
        return Operands(read=[_message(tensors, form)], written=written)

    def ours(operands: Operands) -> Run:
        (message,), tensors = operands.read, list(operands.written)
        return lambda: unpack_message_(tensors, message, form)

    def definition(operands: Operands) -> None:
        (message,), tensors = operands.read, list(operands.written)
        layout = message_layout(form, [tensor.numel() for tensor in tensors])
        offsets = list(layout.offsets)
        reference_message.unpack_message_(
            tensors, message, form, layout.numel, offsets, 1.0, False, DEFAULT_ROW_NUMEL
        )

    return Case(
        name=f"unpack_message {form} -> {dtype}",
        op="unpack_message_",
        format=form,
        dtype=dtype,
        numel=block_numel,
        num_bytes=lambda numel: _message_bytes(form, numel) + block_numel(numel) * wanted.itemsize,
        make=make,
        ours=ours,
        definition=definition,
        target=registry.target_share("unpack_message_"),
        standard=dtype == "bf16" and form == MXFP8.name,
    )


def _reduce_peers_(out: torch.Tensor, messages: torch.Tensor, form: str) -> None:
    reduce_peer_messages_(out, list(messages), form)


def _sum_case(
    op: str, reduce: Callable[[torch.Tensor, torch.Tensor, str], None], form: str, world: int
) -> Case:
    def shard(numel: int) -> int:
        return max(numel // world // _SHARD_MULTIPLE, 1) * _SHARD_MULTIPLE

    def make(device: torch.device, numel: int) -> Operands:
        parts = torch.randn(world, shard(numel), device=device).bfloat16()
        messages = torch.stack([_message([part], form) for part in parts])
        return Operands(read=[messages], written=[torch.zeros(shard(numel), device=device)])

    def ours(operands: Operands) -> Run:
        (messages,), (out,) = operands.read, operands.written
        return lambda: reduce(out, messages, form)

    def definition(operands: Operands) -> None:
        (messages,), (out,) = operands.read, operands.written
        reference_reduce_message.reduce_messages_(out, messages, form)

    return Case(
        name=f"{op.rstrip('_')} world {world} {form}",
        op=op,
        format=form,
        dtype="fp32",
        world=world,
        numel=lambda numel: world * shard(numel),
        num_bytes=lambda numel: (
            world * message_layout(form, [shard(numel)]).num_bytes + 4 * shard(numel)
        ),
        make=make,
        ours=ours,
        definition=definition,
        rivals={"torch.sum": _torch_sum} if form == BF16.name else {},
        target=registry.target_share(op),
        standard=form in (_SUMMED if op == "reduce_messages_" else _SUMMED_BY_ADDRESS),
    )


def _torch_sum(operands: Operands) -> Run:
    (messages,), (out,) = operands.read, operands.written
    parts = torch.randn(len(messages), len(out), device=out.device).bfloat16()
    return lambda: torch.sum(parts, 0, dtype=torch.float32, out=out)
