"""The cases of `pack_`, `unpack_` and `reduce_`: the gradients of a Llama block, and sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..case import DTYPES, Case, Gate, Operands, Row
from ..inputs import block, block_numel, offsets_of
from .op import pack_, reduce_, unpack_

WORLDS = (2, 8)

_MANY = "fp32, bf16, fp16, mixed"
_ONCE = "nearest even, once"
_PACK = Row(
    "pack_", "pack_", _MANY, "source + destination; the destination twice with accumulate", _ONCE,
    "bit-exact: `pack.reference`, a naive loop", "this project", 0.92,
)  # fmt: skip
_UNPACK = Row(
    "unpack_", "unpack_", _MANY, "source + destination; the destination twice with accumulate",
    _ONCE, "bit-exact: `pack.reference`, a naive loop", "this project", 0.92,
)  # fmt: skip
_REDUCE = Row(
    "reduce_", "reduce_", "fp32, bf16, fp16",
    "world * part + result; the result twice with accumulate",
    "fp32 sum in rank order, then nearest even, once",
    "bit-exact: `pack.reference`, a naive loop", "this project", 0.90,
)  # fmt: skip

# What training does: same dtype, FP32 sums, narrow wire.
_STANDARD = (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16"))
# The costliest of each dtype of the flat buffer; the dtypes of tensors are all in one kernel.
_SCALED = tuple(("bf16", flat) for flat in DTYPES)
_MOVE_GATE = Gate(None, 40)
_SUM_GATE = Gate(None, 48)
# World, parts, result: scaled and accumulated, with gates.
_SCALED_SUMS = (
    *((world, "bf16", "fp32") for world in (2, 8, 64)),
    (8, "fp32", "fp32"),
    (8, "fp32", "bf16"),
)


def rows() -> tuple[Row, ...]:
    """What docs/kernels.md says of the ops."""
    return _PACK, _UNPACK, _REDUCE


def cases(worlds: Sequence[int] | None = None) -> Iterator[Case]:
    """All, the sums over `worlds`, by default those that are standard and those with gates."""
    pairs = [(source, target) for source in DTYPES for target in DTYPES]
    for source, target in pairs:
        yield _pack_case(source, target)
    yield _pack_case("bf16", "fp32", accumulate=True)
    for source, target in _SCALED:
        yield _pack_case(source, target, accumulate=True, scale=0.5)
    yield _pack_case("bf16", "bf16", scale=0.5)
    for source, target in pairs:
        yield _unpack_case(source, target)
    for target, source in _SCALED:
        yield _unpack_case(source, target, accumulate=True, scale=0.5)
    yield _unpack_case("bf16", "bf16", scale=0.5)
    for world in worlds or WORLDS:
        for parts in DTYPES:
            yield _reduce_case(world, parts, "fp32")
        yield _reduce_case(world, "bf16", "fp32", accumulate=True)
    if worlds is None:
        for world, parts, out in _SCALED_SUMS:
            yield _reduce_case(world, parts, out, accumulate=True, scale=0.5)


def _options(accumulate: bool, scale: float) -> str:
    return " scaled" * (scale != 1.0) + " accumulate" * accumulate


def _pack_case(source: str, target: str, *, accumulate: bool = False, scale: float = 1.0) -> Case:
    old, new = DTYPES[source], DTYPES[target]
    moved = old.itemsize + new.itemsize * (2 if accumulate else 1)

    def make(device: torch.device, numel: int) -> Operands:
        tensors = block(device, numel, old)
        _, end = offsets_of(tensors)
        flat = torch.full((end,), 0.5, device=device, dtype=new)
        return Operands(read=tensors, **{"updated" if accumulate else "written": [flat]})

    def call(operands: Operands) -> None:
        (flat,), tensors = operands.results(), operands.read
        offsets, _ = offsets_of(tensors)
        pack_(flat, tensors, offsets, scale=scale, accumulate=accumulate)

    return Case(
        op="pack_",
        name=f"{source} to {target}" + _options(accumulate, scale),
        format=target,
        dtype=source,
        make=make,
        call=call,
        numel=block_numel,
        num_bytes=lambda numel: block_numel(numel) * moved,
        gate=_MOVE_GATE if scale != 1.0 else None,
        copy_share=_PACK.copy_share,
        standard=(source, target) in _STANDARD and scale == 1.0,
    )


def _unpack_case(source: str, target: str, *, accumulate: bool = False, scale: float = 1.0) -> Case:
    old, new = DTYPES[source], DTYPES[target]
    moved = old.itemsize + new.itemsize * (2 if accumulate else 1)

    def make(device: torch.device, numel: int) -> Operands:
        tensors = [torch.full_like(one, 0.5) for one in block(device, numel, new)]
        _, end = offsets_of(tensors)
        flat = torch.randn(end, device=device).to(old)
        return Operands(read=[flat], **{"updated" if accumulate else "written": tensors})

    def call(operands: Operands) -> None:
        (flat,), tensors = operands.read, operands.results()
        offsets, _ = offsets_of(tensors)
        unpack_(tensors, flat, offsets, scale=scale, accumulate=accumulate)

    return Case(
        op="unpack_",
        name=f"{source} to {target}" + _options(accumulate, scale),
        format=source,
        dtype=target,
        make=make,
        call=call,
        numel=block_numel,
        num_bytes=lambda numel: block_numel(numel) * moved,
        gate=_MOVE_GATE if scale != 1.0 else None,
        copy_share=_UNPACK.copy_share,
        standard=(source, target) == ("bf16", "bf16") and scale == 1.0,
    )


def _reduce_case(
    world: int, parts: str, out: str, *, accumulate: bool = False, scale: float = 1.0
) -> Case:
    part, total = DTYPES[parts], DTYPES[out]
    moved = world * part.itemsize + total.itemsize * (2 if accumulate else 1)

    def shard(numel: int) -> int:
        return max(numel // world // 8, 1) * 8

    def make(device: torch.device, numel: int) -> Operands:
        rows = torch.randn(world, shard(numel), device=device).to(part)
        result = torch.full((shard(numel),), 0.5, device=device, dtype=total)
        return Operands(read=[rows], **{"updated" if accumulate else "written": [result]})

    def call(operands: Operands) -> None:
        (rows,), (result,) = operands.read, operands.results()
        reduce_(result, rows, scale=scale, accumulate=accumulate)

    return Case(
        op="reduce_",
        name=f"{parts} to {out} world {world}" + _options(accumulate, scale),
        format=parts,
        dtype=out,
        world=world,
        make=make,
        call=call,
        numel=lambda numel: world * shard(numel),
        num_bytes=lambda numel: shard(numel) * moved,
        gate=_SUM_GATE if scale != 1.0 else None,
        copy_share=_REDUCE.copy_share,
        standard=parts == "bf16" and scale == 1.0,
    )
