"""The cases of wire messages: packed from a Llama block, unpacked, summed over ranks.

A message's padding and header move as well and are counted. Several messages in a call are the same
code, and so no case of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..case import DTYPES, Case, Gate, Operands, Row
from ..formats.table import E2M1, MESSAGES
from ..inputs import NOISE, STOCHASTIC, block, block_numel, block_shapes
from .layout import message_layout
from .op import pack_message_, reduce_messages_, reduce_peer_messages_, unpack_message_

WORLDS = (8,)
_SHARD_MULTIPLE = 1024  # a row of the formats that have rows
_GATED_DTYPES = ("fp32", "bf16")

_MESSAGE = "fp32, bf16, fp16, fp8_row, fp8_1x128, mxfp8, mxfp4, nvfp4 with scales"
_PACK = Row(
    "pack_message_", "pack_message_", f"fp32, bf16, fp16, mixed -> one or more of {_MESSAGE}",
    "source + message",
    "as the format's cast, or stochastic (not fp32, fp16); a block that is not finite is NaN",
    "bit-exact: the formats' own casts, golden vectors", "this project", 0.92,
)  # fmt: skip
_UNPACK = Row(
    "unpack_message_", "unpack_message_", f"one or more of {_MESSAGE} -> fp32, bf16, fp16, mixed",
    "message + result; the result twice with accumulate", "nearest even, once",
    "bit-exact: the formats' own decoders", "this project", 0.92,
)  # fmt: skip
_SUM = Row(
    "reduce_messages_", "reduce_messages_", f"{_MESSAGE} -> fp32, bf16, fp16",
    "world * message + result; the result twice with accumulate",
    "decoded by one product, fp32 sum in rank order, then nearest even, once",
    "bit-exact: `wire.reference`, the formats' own decoders", "this project", 0.90,
)  # fmt: skip
_PEER_SUM = Row(
    "reduce_peer_messages_", "reduce_peer_messages_", f"{_MESSAGE} -> fp32, bf16, fp16",
    "as reduce_messages_, and 8 of address a message and program", "as reduce_messages_",
    "bit-exact: `wire.reference`", "this project", 0.90,
)  # fmt: skip

# While an H100 moves the bytes of BF16 to MXFP8 there is time for 30 instructions an element, to
# FP4 for 25, from FP32 to FP4 for 45.
_PACK_GATES = {
    "fp32 from bf16": Gate(5.0, 40),
    "bf16 from bf16": Gate(1.75, 40),
    "bf16 from fp32": Gate(2.5, 40),
    "bf16 from bf16 stochastic": Gate(11.5, 48),
    "fp8_row from bf16": Gate(10.5),
    "fp8_1x128 from bf16": Gate(9.5),
    "fp8_1x128 from bf16 stochastic": Gate(24.0, 88),
    "mxfp8 from bf16": Gate(6.0),
    "mxfp8 from bf16 stochastic": Gate(21.5),
    "mxfp4 from bf16": Gate(18.5),
    "mxfp4 from bf16 stochastic": Gate(18.5),
    "mxfp4 from fp32 stochastic": Gate(18.0),
    "nvfp4 from bf16": Gate(23.5, 72),
    "nvfp4 from bf16 stochastic": Gate(23.5, 96),
    "nvfp4 from fp32 stochastic": Gate(23.0, 96),
}
_UNPACK_GATES = {
    "fp32 to bf16": Gate(3.0, 48),
    "bf16 to bf16": Gate(2.0, 40),
    "fp16 to fp16": Gate(2.0, 40),
    "fp8_row to bf16": Gate(6.0, 48),
    "fp8_1x128 to bf16": Gate(6.5, 48),
    "mxfp8 to bf16": Gate(7.25, 48),
    "mxfp4 to bf16": Gate(11.5, 48),
    "nvfp4 to bf16": Gate(14.5, 48),
}
# Of messages in rows, scaled.
_SUM_GATES = {
    "fp32 to fp32": Gate(23.0, 96),
    "bf16 to fp32": Gate(33.0, 96),
    "bf16 to bf16": Gate(29.0, 96),
    "fp16 to fp32": Gate(29.0, 96),
    "fp8_row to fp32": Gate(41.0, 96),
    "fp8_1x128 to bf16": Gate(40.0, 96),
    "mxfp8 to fp32": Gate(43.0, 96),
    "mxfp8 to bf16": Gate(42.0, 96),
    "mxfp4 to fp32": Gate(57.0, 96),
    "mxfp4 to bf16": Gate(56.0, 96),
    "nvfp4 to fp32": Gate(62.0, 96),
    "nvfp4 to bf16": Gate(61.0, 96),
}
_GATED_WORLD = 8

_PACKED = ("bf16", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
_UNPACKED = ("mxfp8",)
_SUMMED = {
    "reduce_messages_": ("bf16", "fp8_row", "mxfp8", "mxfp4", "nvfp4"),
    "reduce_peer_messages_": ("mxfp8",),
}


def rows() -> tuple[Row, ...]:
    """What docs/kernels.md says of the ops."""
    return _PACK, _UNPACK, _SUM, _PEER_SUM


def cases(worlds: Sequence[int] | None = None) -> Iterator[Case]:
    """All, of every format in the table; the sums are over `worlds`."""
    for form in MESSAGES:
        for dtype in DTYPES:
            yield _pack_case(dtype, form, stochastic=False)
            if MESSAGES[form].has_stochastic:
                yield _pack_case(dtype, form, stochastic=True)
            yield _unpack_case(form, dtype)
        for world in worlds or WORLDS:
            for dtype in _GATED_DTYPES:
                for row in (_SUM, _PEER_SUM):
                    yield _sum_case(row, form, dtype, world)
            if worlds is None and world == _GATED_WORLD:
                for dtype in _GATED_DTYPES:
                    yield _sum_case(_SUM, form, dtype, world, scale=0.5)


def _message(tensors: Sequence[torch.Tensor], form: str) -> torch.Tensor:
    layout = message_layout(form, [tensor.numel() for tensor in tensors])
    message = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=tensors[0].device)
    pack_message_(message, tensors, form)
    return message


def _message_bytes(form: str, numel: int) -> int:
    numels = [torch.Size(shape).numel() for shape in block_shapes(numel)]
    return message_layout(form, numels).num_bytes


def _pack_case(dtype: str, form: str, *, stochastic: bool) -> Case:
    name = f"{form} from {dtype}" + STOCHASTIC * stochastic

    def make(device: torch.device, numel: int) -> Operands:
        tensors = block(device, numel, DTYPES[dtype])
        return Operands(read=tensors, written=[torch.zeros_like(_message(tensors, form))])

    def call(operands: Operands, first_index: int | None = None) -> None:
        (message,) = operands.written
        noise = dict(NOISE) if stochastic else {}
        if first_index is not None:
            noise["first_indices"] = [first_index]
        pack_message_(message, operands.read, form, **noise)

    return Case(
        op="pack_message_",
        name=name,
        format=form,
        dtype=dtype,
        make=make,
        call=call,
        numel=block_numel,
        num_bytes=lambda numel: (
            block_numel(numel) * DTYPES[dtype].itemsize + _message_bytes(form, numel)
        ),
        gate=_PACK_GATES.get(name),
        copy_share=_PACK.share_of(fp4=MESSAGES[form].element is E2M1, stochastic=stochastic),
        standard=dtype == "bf16" and form in _PACKED and not stochastic,
    )


def _unpack_case(form: str, dtype: str) -> Case:
    name = f"{form} to {dtype}"

    def make(device: torch.device, numel: int) -> Operands:
        tensors = block(device, numel, torch.bfloat16)
        written = [torch.zeros_like(tensor, dtype=DTYPES[dtype]) for tensor in tensors]
        return Operands(read=[_message(tensors, form)], written=written)

    def call(operands: Operands) -> None:
        unpack_message_(operands.written, operands.read[0], form)

    return Case(
        op="unpack_message_",
        name=name,
        format=form,
        dtype=dtype,
        make=make,
        call=call,
        numel=block_numel,
        num_bytes=lambda numel: (
            _message_bytes(form, numel) + block_numel(numel) * DTYPES[dtype].itemsize
        ),
        gate=_UNPACK_GATES.get(name),
        copy_share=_UNPACK.share_of(),
        standard=dtype == "bf16" and form in _UNPACKED,
    )


def _sum_case(row: Row, form: str, dtype: str, world: int, *, scale: float = 1.0) -> Case:
    pair = f"{form} to {dtype}"

    def shard(numel: int) -> int:
        return max(numel // world // _SHARD_MULTIPLE, 1) * _SHARD_MULTIPLE

    def make(device: torch.device, numel: int) -> Operands:
        parts = torch.randn(world, shard(numel), device=device).bfloat16()
        messages = torch.stack([_message([part], form) for part in parts])
        out = torch.zeros(shard(numel), dtype=DTYPES[dtype], device=device)
        return Operands(read=[messages], written=[out])

    def call(operands: Operands) -> None:
        (messages,), (out,) = operands.read, operands.written
        if row is _SUM:
            reduce_messages_(out, messages, form, scale=scale)
        else:
            reduce_peer_messages_(out, list(messages), form, scale=scale)

    return Case(
        op=row.op,
        name=f"{pair} world {world}" + " scaled" * (scale != 1.0),
        format=form,
        dtype=dtype,
        world=world,
        make=make,
        call=call,
        numel=lambda numel: world * shard(numel),
        num_bytes=lambda numel: (
            world * message_layout(form, [shard(numel)]).num_bytes
            + DTYPES[dtype].itemsize * shard(numel)
        ),
        gate=_SUM_GATES.get(pair) if scale != 1.0 else None,
        copy_share=row.share_of(),
        standard=dtype == "fp32" and scale == 1.0 and form in _SUMMED[row.op],
    )
