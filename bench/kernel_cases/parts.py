"""Whether what is timed is right at its full size: its head, its middle and its tail.

The definition would take minutes for all of it, so parts are cut out of the operands before a call
of ours, and the definition, the same call on a CPU, makes the results of the parts.

    rows      of a matrix or a shard: as many blocks of every tensor
    tensors   many beside a flat buffer or a message: the first one's head, a middle one's middle,
              the last one's tail, and their place in the other
    ranks     sums: the same elements of every rank
    both      of a matrix and of its transpose: rows of the one, columns of the other
    grouped   rows of one group, from one of its tiles of scales on, as the first group of the part
    planted   where all elements decide, as for a norm, a maximum or the scale of a whole tensor: a
              number that outweighs all others lies in the part, which then decides alone

Not looked at here are optimizers with all options, whose segments lie elsewhere in a part, and
noise of both sides of a matrix, whose indices are others there. Those cases are compared at a small
size alone, as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

from ...kernels.case import Case, Operands, same
from ...kernels.formats.swizzle import TILE_NUMEL
from ...kernels.formats.table import BLOCK_FORMATS
from ...kernels.grouped.reference import nan_scale, scales_numel
from ...kernels.inputs import SQUARE_ROWS, STOCHASTIC, offsets_of
from ...kernels.wire.layout import (
    DEFAULT_ROW_NUMEL,
    MessageLayout,
    layout_of_numel,
    message_layout,
    write_header,
)

ONLY_READ = ("amax_nvfp4_", "amax_nvfp4_with_transpose_", "amax_nvfp4_grouped_", "l2_norm_")
"""Ops that write one number, or one a group, which all elements decide."""
PART_NUMEL = 64 * 1024
PLACES: Mapping[str, float] = {"head": 0.0, "middle": 0.5, "tail": 1.0}
# Its square is more than 2^53 times that of the largest normal number; infinity in FP16.
_PLANTED = 2.0**40
_SCALED_BY_ALL = ("fp8_tensor", "fp8_delayed")
_QUANTIZES_FP8 = ("quantize_fp8_", "quantize_fp8_with_transpose_", "quantize_fp8_grouped_")
_BOTH = "_with_transpose_"
_OPTIONS, _SWIZZLED = "all options", " swizzled"
_SECTIONS = (
    ("data_at", "scales_at"),
    ("scales_at", "row_scales_at"),
    ("row_scales_at", "num_bytes"),
)
_FORMATS = {form.name: form for form in BLOCK_FORMATS}
_MANY = 1 << 20  # elements of whose sections none needs padding

CPU = torch.device("cpu")


Call = Callable[[], Sequence[torch.Tensor]]
"""A call of ours on the operands, by whatever means; returns what it made."""


def fault(case: Case, operands: Operands, call: Call | None = None) -> str | None:
    """What is wrong with the results of `call`, if anything is; what is read stays as it was."""
    call = call or (lambda: case.results(operands))
    if _OPTIONS in case.name or (_BOTH in case.op and STOCHASTIC in case.name):
        return None
    if not is_decided_by_all(case):
        return _fault(case, operands, PLACES, call)
    for place in PLACES:
        with _planted(_cut(case, operands, PLACES[place]).read, PLACES[place]):
            found = _fault(case, operands, {place: PLACES[place]}, call)
        if found is not None:
            return found
    return None


def _fault(case: Case, operands: Operands, places: Mapping[str, float], call: Call) -> str | None:
    """After one call."""
    parts = {name: _cut(case, operands, place).copied(CPU) for name, place in places.items()}
    read = operands.read or operands.updated
    whole = Operands(read=read, written=call(), scalars=operands.scalars)
    for name, place in places.items():
        found = _cut(case, whole, place).written
        if not same(found, case.results(parts[name], **_index(case, operands, place))):
            return f"not the bits of its definition in the {name}"
    return None


def _cut(case: Case, operands: Operands, place: float) -> Operands:
    """The part at `place`, from 0 to 1, in memory of the operands but for messages."""
    return _CUTS.get(case.op, _rows)(case, operands, place)


def is_decided_by_all(case: Case) -> bool:
    """Whether every element of the result depends on all that is read."""
    return case.op in ONLY_READ or (case.op in _QUANTIZES_FP8 and case.format in _SCALED_BY_ALL)


@contextlib.contextmanager
def _planted(read: Sequence[torch.Tensor], place: float) -> Iterator[None]:
    """Within the block the number lies at `place` of the part that is read."""
    flat = read[0].view(-1)
    at = round(place * (flat.numel() - 1))
    before = flat[at].clone()
    flat[at] = _PLANTED * (1.0 + place)  # above what a record of the largest holds already
    try:
        yield
    finally:
        flat[at] = before


def _index(case: Case, operands: Operands, place: float) -> dict[str, int]:
    """Where the part begins, for the noise that its elements get."""
    if STOCHASTIC not in case.name:
        return {}
    if case.op == "pack_message_":
        piece = _piece(operands.read, place, DEFAULT_ROW_NUMEL)
        whole = message_layout(case.format, [tensor.numel() for tensor in operands.read])
        return {"first_index": whole.offsets[piece.tensor] + piece.start}
    part = _cut(case, operands, place).read[0]
    return {"first_index": int(part.storage_offset() - operands.read[0].storage_offset())}


class _Piece(NamedTuple):
    """Elements `start` to `stop` of a tensor of several."""

    tensor: int
    start: int
    stop: int


def _piece(tensors: Sequence[torch.Tensor], place: float, align: int = 1) -> _Piece:
    """What lies at `place`, from 0 to 1, of all tensors; it starts at a multiple of `align`."""
    index = round(place * (len(tensors) - 1))
    numel = tensors[index].numel()
    count = min(PART_NUMEL, numel)
    start = round(place * (numel - count)) // align * align
    stop = start + count
    return _Piece(index, start, stop if numel - stop >= align else numel)


def _rows(case: Case, operands: Operands, place: float) -> Operands:
    """As many rows of every tensor, 128 at a time where scales are of as many; a number that is
    alone is left whole, and so is all where fewer rows share a scale.
    """
    first = (*operands.read, *operands.updated)[0]
    tensors = (*operands.read, *operands.written, *operands.updated)
    blocks = len(first)
    if _SWIZZLED in case.name or any(len(one) % blocks for one in tensors if one.ndim):
        blocks = blocks // SQUARE_ROWS if blocks % SQUARE_ROWS == 0 else 1
    count = min(blocks, -(-PART_NUMEL * blocks // first.numel()))
    start = round(place * (blocks - count))

    def cut(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            tensor[start * len(tensor) // blocks : (start + count) * len(tensor) // blocks]
            if tensor.ndim and len(tensor) % blocks == 0
            else tensor
            for tensor in tensors
        ]

    return Operands(
        read=cut(operands.read),
        written=cut(operands.written),
        updated=cut(operands.updated),
        scalars=cut(operands.scalars),
    )


def _both(case: Case, operands: Operands, place: float) -> Operands:
    """Rows of the source and of the first half of what is written, columns of the other half; then
    come numbers that are alone, and left.
    """
    (x,) = operands.read
    sides = [tensor for tensor in operands.written if tensor.ndim]
    half = len(sides) // 2
    blocks = len(x) // SQUARE_ROWS if len(x) % SQUARE_ROWS == 0 else 1
    count = min(blocks, -(-PART_NUMEL * blocks // x.numel()))
    first = round(place * (blocks - count))

    def cut(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        length = tensor.shape[dim] // blocks
        return tensor.narrow(dim, first * length, count * length)

    def columns_of(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 1:  # swizzled scales: tiles of as many rows below each other
            return cut(tensor.view(x.shape[1] // SQUARE_ROWS, -1), 1).reshape(-1)
        return cut(tensor, -1)

    rows = [cut(tensor, 0) for tensor in sides[:half]]
    columns = [columns_of(tensor) for tensor in sides[half:]]
    written = [*rows, *columns, *operands.written[len(sides) :]]
    return replace(operands, read=[cut(x, 0)], written=written)


def _grouped(case: Case, operands: Operands, place: float) -> Operands:
    """Rows of the group at `place`; the part's other groups are empty, and follow."""
    (x,), (ends, *scalars) = operands.read, operands.scalars
    begins = [0, *ends.tolist()]
    group = sum(end <= round(place * (len(x) - 1)) for end in begins[1:])
    first, size = begins[group], begins[group + 1] - begins[group]
    count = min(size, _up(-(-PART_NUMEL // x.shape[1]), SQUARE_ROWS))
    start = round(place * (size - count)) // SQUARE_ROWS * SQUARE_ROWS
    count = count if size - start - count >= SQUARE_ROWS else size - start
    rows = slice(first + start, first + start + count)
    before = sum(_up(end - begin, SQUARE_ROWS) for begin, end in pairwise(begins[: group + 1]))
    tiles = slice(
        (before + start) // SQUARE_ROWS, (before + _up(start + count, SQUARE_ROWS)) // SQUARE_ROWS
    )

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim > 1:
            return tensor[rows]
        if tensor.shape == ends.shape:
            empty = 0.0 if case.op in ONLY_READ else 1.0
            return torch.cat((tensor[group : group + 1], torch.full_like(tensor[1:], empty)))
        # Tiles of scales, as many across as a row needs, and behind them those of no group.
        found = tensor.view(torch.uint8).view(_num_tiles(len(x), len(ends)), -1)
        made = found.new_full(
            (_num_tiles(count, len(ends)), found.shape[1]), nan_scale(_FORMATS[case.format])
        )
        made[: tiles.stop - tiles.start] = found[tiles]
        return made.view(-1).view(tensor.dtype)

    return Operands(
        read=[x[rows]],
        written=[cut(tensor) for tensor in operands.written],
        scalars=[torch.full_like(ends, count), *(one.roll(-group) for one in scalars)],
    )


def _num_tiles(rows: int, num_groups: int) -> int:
    """Tiles of swizzled scales below each other, however rows are grouped."""
    return scales_numel(rows, 1, num_groups) // TILE_NUMEL


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _tensors(case: Case, operands: Operands, place: float) -> Operands:
    """Of tensors whose result is scalars."""
    del case
    return replace(operands, read=[_part(operands.read, _piece(operands.read, place))])


def _part(tensors: Sequence[torch.Tensor], piece: _Piece) -> torch.Tensor:
    return tensors[piece.tensor].view(-1)[piece.start : piece.stop]


def _packed(case: Case, operands: Operands, place: float) -> Operands:
    """Of tensors and what they are packed into."""
    piece = _piece(operands.read, place)
    start = offsets_of(operands.read)[0][piece.tensor] + piece.start

    def cut(flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [flat[start : start + piece.stop - piece.start] for flat in flats]

    return Operands(
        read=[_part(operands.read, piece)],
        written=cut(operands.written),
        updated=cut(operands.updated),
    )


def _unpacked(case: Case, operands: Operands, place: float) -> Operands:
    """The other way round."""
    tensors = operands.results()
    piece = _piece(tensors, place)
    start = offsets_of(tensors)[0][piece.tensor] + piece.start
    (flat,) = operands.read
    kind = "updated" if operands.updated else "written"
    return Operands(
        read=[flat[start : start + piece.stop - piece.start]], **{kind: [_part(tensors, piece)]}
    )


def _packed_message(case: Case, operands: Operands, place: float) -> Operands:
    piece = _piece(operands.read, place, DEFAULT_ROW_NUMEL)
    (message,) = operands.written
    return Operands(
        read=[_part(operands.read, piece)],
        written=[_message_of(case.format, operands.read, piece, message)],
    )


def _unpacked_message(case: Case, operands: Operands, place: float) -> Operands:
    piece = _piece(operands.written, place, DEFAULT_ROW_NUMEL)
    (message,) = operands.read
    return Operands(
        read=[_message_of(case.format, operands.written, piece, message)],
        written=[_part(operands.written, piece)],
    )


def _summed_messages(case: Case, operands: Operands, place: float) -> Operands:
    (messages,) = operands.read
    piece = _piece(operands.written, place, DEFAULT_ROW_NUMEL)
    parts = [_message_of(case.format, operands.written, piece, one) for one in messages]
    return Operands(read=[torch.stack(parts)], written=[_part(operands.written, piece)])


def _summed(case: Case, operands: Operands, place: float) -> Operands:
    (parts,) = operands.read
    piece = _piece(operands.results(), place)
    kind = "updated" if operands.updated else "written"
    return Operands(
        read=[parts[:, piece.start : piece.stop]], **{kind: [_part(operands.results(), piece)]}
    )


def _message_of(
    form: str, tensors: Sequence[torch.Tensor], piece: _Piece, message: torch.Tensor
) -> torch.Tensor:
    """The message that the piece alone would make, out of that of all tensors."""
    whole = message_layout(form, [tensor.numel() for tensor in tensors])
    part = message_layout(form, [piece.stop - piece.start])
    first = whole.offsets[piece.tensor] + piece.start
    found = message.new_zeros(part.num_bytes)
    write_header(found, part)
    for begin, end in _SECTIONS:
        source = getattr(whole, begin) + _section_bytes(form, begin, end, first)
        target, size = getattr(part, begin), _section_bytes(form, begin, end, part.numel)
        found[target : target + size] = message[source : source + size]
    return found


def _section_bytes(form: str, begin: str, end: str, numel: int) -> int:
    """Of so many elements, without what pads the section."""
    many: MessageLayout = layout_of_numel(form, _MANY)
    return (getattr(many, end) - getattr(many, begin)) * numel // _MANY


_CUTS: Mapping[str, Callable[[Case, Operands, float], Operands]] = {
    "pack_": _packed,
    "unpack_": _unpacked,
    "reduce_": _summed,
    "pack_message_": _packed_message,
    "unpack_message_": _unpacked_message,
    "reduce_messages_": _summed_messages,
    "reduce_peer_messages_": _summed_messages,
    "l2_norm_": _tensors,
    "quantize_mx_with_transpose_": _both,
    "quantize_nvfp4_with_transpose_": _both,
    "quantize_fp8_with_transpose_": _both,
    "amax_nvfp4_with_transpose_": _both,
    "quantize_fp8_grouped_": _grouped,
    "quantize_mx_grouped_": _grouped,
    "quantize_nvfp4_grouped_": _grouped,
    "amax_nvfp4_grouped_": _grouped,
}
