"""Owns the cases of `pack_`, `unpack_` and `reduce_`: the gradients of a Llama block, and sums.

Rivals are what FSDP2 and others use: torch.cat, `_foreach_copy_`, `_chunk_cat` and
`split_with_sizes_copy`, and `torch.sum` over stacked partial sums. The definitions are loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...kernels import pack_, reduce_, registry, unpack_
from .case import DTYPES, Bind, Case, Operands, Run, as_bind, block_numel, block_shapes, offsets_of

# (source, destination); the first three are what training does: same dtype, FP32 sums, narrow wire.
_STANDARD = (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16"))
_ACCUMULATED = ("bf16", "fp32")
_REDUCED = ("bf16", "fp32")
_CHUNK_CAT, _SPLIT = "_chunk_cat", "split_with_sizes"
# Their tables of addresses are copied from pinned memory that is free as soon as they return.
_UNCAPTURED = frozenset((_CHUNK_CAT, _SPLIT))


def cases(worlds: Sequence[int]) -> Iterator[Case]:
    """All, each for any size."""
    for source in DTYPES:
        for target in DTYPES:
            standard = (source, target) in _STANDARD
            yield _pack_case(source, target, accumulate=False, standard=standard)
            yield _unpack_case(source, target)
    yield _pack_case(*_ACCUMULATED, accumulate=True, standard=True)
    for world in worlds:
        for source in DTYPES:
            yield _reduce_case(world, source, accumulate=False)
        yield _reduce_case(world, _REDUCED[0], accumulate=True)


def _block(device: torch.device, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for shape in block_shapes(numel)]


def _views(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], *, gaps: bool = True
) -> list[torch.Tensor]:
    """What of `flat` belongs to each tensor, in its shape."""
    if not gaps:
        parts = flat.split([tensor.numel() for tensor in tensors])
    else:
        offsets, _ = offsets_of(tensors)
        parts = tuple(
            flat[offset : offset + tensor.numel()]
            for offset, tensor in zip(offsets, tensors, strict=True)
        )
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _pack_case(source: str, target: str, *, accumulate: bool, standard: bool) -> Case:
    old, new = DTYPES[source], DTYPES[target]

    def make(device: torch.device, numel: int) -> Operands:
        tensors = _block(device, numel, old)
        slots = [torch.full_like(tensor, 0.5, dtype=new) for tensor in tensors]
        return Operands(read=tensors, **{"updated" if accumulate else "written": slots})

    def ours(operands: Operands) -> Run:
        tensors = list(operands.read)
        offsets, end = offsets_of(tensors)
        flat = torch.full((end,), 0.5, device=tensors[0].device, dtype=new)
        slots = _views(flat, tensors)

        def run() -> tuple[torch.Tensor, ...]:
            pack_(flat, tensors, offsets, accumulate=accumulate, slots=slots)
            return tuple(slots)

        return run

    return Case(
        name=f"pack {source} -> {target}" + (" accumulate" if accumulate else ""),
        op="pack_",
        format=target,
        dtype=source,
        numel=block_numel,
        num_bytes=lambda numel: (
            block_numel(numel) * (old.itemsize + new.itemsize * (2 if accumulate else 1))
        ),
        make=make,
        ours=ours,
        definition=_added_one_by_one if accumulate else _copied_one_by_one,
        plain=as_bind(_added_one_by_one if accumulate else _copied_one_by_one),
        rivals={"_foreach_add_": _foreach_add} if accumulate else _pack_rivals(new),
        uncaptured=_UNCAPTURED,
        target=registry.target_share("pack_"),
        standard=standard,
    )


def _copied_one_by_one(operands: Operands) -> None:
    for slot, tensor in zip(operands.written, operands.read, strict=True):
        slot.copy_(tensor)


def _added_one_by_one(operands: Operands) -> None:
    for slot, tensor in zip(operands.updated, operands.read, strict=True):
        slot.copy_(slot.float() + tensor.float())


def _foreach_add(operands: Operands) -> Run:
    slots, tensors = list(operands.updated), list(operands.read)
    return lambda: torch._foreach_add_(slots, tensors)


def _foreach_copy(operands: Operands) -> Run:
    slots, tensors = list(operands.written), list(operands.read)
    return lambda: torch._foreach_copy_(slots, tensors)


def _pack_rivals(target: torch.dtype) -> dict[str, Bind]:
    def flat_of(operands: Operands) -> tuple[list[torch.Tensor], torch.Tensor]:
        rows = [tensor.view(1, -1) for tensor in operands.read]
        numel = sum(row.numel() for row in rows)
        return rows, torch.empty(1, numel, device=rows[0].device, dtype=target)

    def cat(operands: Operands) -> Run:
        rows, flat = flat_of(operands)
        return lambda: torch.cat(rows, 1, out=flat)

    def chunk_cat(operands: Operands) -> Run:
        rows, flat = flat_of(operands)
        chunks = flat.view(1, 1, -1)
        return lambda: torch._chunk_cat(rows, dim=1, num_chunks=1, out=chunks)

    return {"torch.cat": cat, "_foreach_copy_": _foreach_copy, _CHUNK_CAT: chunk_cat}


def _unpack_case(source: str, target: str) -> Case:
    old, new = DTYPES[source], DTYPES[target]

    def make(device: torch.device, numel: int) -> Operands:
        slots = _block(device, numel, old)
        return Operands(read=slots, written=[torch.zeros_like(slot, dtype=new) for slot in slots])

    def ours(operands: Operands) -> Run:
        tensors = list(operands.written)
        offsets, end = offsets_of(tensors)
        flat = torch.zeros(end, device=tensors[0].device, dtype=old)
        torch._foreach_copy_(_views(flat, tensors), list(operands.read))
        return lambda: unpack_(tensors, flat, offsets)

    def split(operands: Operands) -> Run:
        flat = torch.cat([slot.view(-1) for slot in operands.read])
        sizes = [tensor.numel() for tensor in operands.written]
        out = [tensor.view(-1) for tensor in operands.written]
        return lambda: torch.split_with_sizes_copy(flat, sizes, out=out)

    rivals: dict[str, Bind] = {"_foreach_copy_": _foreach_copy}
    if source == target:
        rivals[_SPLIT] = split
    return Case(
        name=f"unpack {source} -> {target}",
        op="unpack_",
        format=source,
        dtype=target,
        numel=block_numel,
        num_bytes=lambda numel: block_numel(numel) * (old.itemsize + new.itemsize),
        make=make,
        ours=ours,
        definition=_copied_one_by_one,
        plain=as_bind(_copied_one_by_one),
        rivals=rivals,
        uncaptured=_UNCAPTURED,
        target=registry.target_share("unpack_"),
        standard=(source, target) == ("bf16", "bf16"),
    )


def _reduce_case(world: int, source: str, *, accumulate: bool) -> Case:
    part = DTYPES[source]
    total = torch.float32

    def shard(numel: int) -> int:
        return max(numel // world // 8, 1) * 8

    def make(device: torch.device, numel: int) -> Operands:
        parts = torch.randn(world, shard(numel), device=device).to(part)
        out = torch.full((shard(numel),), 0.5, device=device, dtype=total)
        return Operands(read=[parts], **{"updated" if accumulate else "written": [out]})

    def ours(operands: Operands) -> Run:
        (parts,), (out,) = operands.read, operands.results()
        rows = parts.unbind()
        return lambda: reduce_(out, parts, accumulate=accumulate, rows=rows)

    def definition(operands: Operands) -> None:
        (parts,), (out,) = operands.read, operands.results()
        added = parts[0].float()
        for one in parts[1:]:
            added = added + one
        out.copy_(out + added if accumulate else added)

    def torch_sum(operands: Operands) -> Run:
        (parts,), (out,) = operands.read, operands.results()
        if accumulate:
            return lambda: out.add_(parts.sum(0, dtype=total))
        return lambda: torch.sum(parts, 0, dtype=total, out=out)

    return Case(
        name=f"reduce world {world} {source} -> fp32" + (" accumulate" if accumulate else ""),
        op="reduce_",
        format=source,
        dtype="fp32",
        world=world,
        numel=lambda numel: world * shard(numel),
        num_bytes=lambda numel: (
            shard(numel) * (world * part.itemsize + total.itemsize * (2 if accumulate else 1))
        ),
        make=make,
        ours=ours,
        definition=definition,
        plain=as_bind(definition),
        rivals={"torch.sum, add_" if accumulate else "torch.sum": torch_sum},
        target=registry.target_share("reduce_"),
        standard=source == "bf16",
    )
