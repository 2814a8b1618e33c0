"""The definition of wire messages in plain PyTorch: the oracle of `cpu` and of the GPU.

    pack_message_    message = header | encode(v), v being 0, and float32(tensor) * scale in FP32
                     from each tensor's offset on; several messages are equal parts of one v
    unpack_message_  tensor  = round(decode(message)[o : o + n] * scale), or with `accumulate`
                               round(float32(tensor) + decode(message)[o : o + n] * scale)
    reduce_messages_ acc     = ((decode(message 0) + decode(message 1)) + decode(message 2)) + ...
                     out     = round(acc * scale), or with `accumulate`
                               round(float32(out) + acc * scale)

All sums are in FP32, one after the other. A format without scales is rounded, too large being
infinity, as IEEE 754 has it. The others have a codec, named in the table of formats, which says
what elements are multiplied by before they are rounded, and codes after: see `fp8.codec`,
`mx.codec` and `nvfp4.codec`.

So a block knows nothing but itself, and for nvfp4 the amax of its row. What is not finite stays
visible, and harms nobody else:

- An element that times `scale`, in FP32, is NaN or infinite makes its block's scale NaN: 255 of
  E8M0, 0x7F of E4M3, 0x7FC00000 of FP32, whichever the format has; the row's where the row is the
  block. All codes of the block are that of a NaN: 0x7F of e4m3, 7 of e2m1. So all of it is decoded
  as NaN, the gap after a tensor too where that shares the block.
- Every other block is as if that one held zeros: the amax of a row of nvfp4 leaves such blocks out,
  and is 0 where there is no other. A format without scales has the one element.
- In a sum a NaN scale makes its own block NaN and no other element. Infinity comes out where finite
  values sum to more than FP32 or `out` can hold.

Stochastic rounding rounds elements, never scales; its noise is that of `first_index` plus an
element's place in its tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..formats import codes
from ..formats.noise import noise_bits
from ..formats.table import BITS_PER_BYTE, BlockFormat, WireFormat, named, rule_of
from ..launch import ACCESS_BYTES, is_aligned
from ..pack import reference
from .layout import DEFAULT_ROW_NUMEL, MessageLayout, layout_of_numel, write_header
from .shares import Share, shares_of, whole_or_flat

_FP32_BITS = torch.float32.itemsize * BITS_PER_BYTE


@dataclass(frozen=True, slots=True)
class MessageCast:
    """How tensors become a message, in the order in which the op takes it.

    rule: of MX's scales. power_of_2: of FP8's. With a `seed`, signed, of 64 bits, elements are
    rounded stochastically. A launcher's `scale` and `seed` may be tensors: see `op`.
    """

    scale: float = 1.0
    row_numel: int = DEFAULT_ROW_NUMEL
    rule: str = "rceil"
    power_of_2: bool = False
    seed: int | None = None


def pack_message_(
    message: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    numel: int,
    offsets: Sequence[int],
    first_indices: Sequence[int],
    *options: Any,
) -> None:
    """Write every byte of `message`, [bytes] or [parts, bytes], of `numel` elements each.

    options: those of `MessageCast`.
    """
    cast = MessageCast(*options)
    layout = layout_of_numel(format, numel, row_numel=cast.row_numel)
    made = aligned_memory(message)
    rows = made.view(-1, layout.num_bytes).unbind()
    sources = whole_or_flat(tensors, offsets, numel)
    shares = shares_of(sources, offsets, first_indices, numel, len(rows))
    for row, share in zip(rows, shares, strict=True):
        _pack_one_(row, share, layout, cast)
    if made is not message:
        message.copy_(made)


def _pack_one_(
    message: torch.Tensor, share: Share, layout: MessageLayout, cast: MessageCast
) -> None:
    """Write every byte of one message."""
    numel, (tensors, offsets, first_indices) = layout.numel, share
    message.zero_()
    write_header(message, layout)
    if cast.seed is None and isinstance(layout.format, WireFormat):
        data = message[layout.data_at : layout.scales_at].view(layout.format.dtype)
        reference.pack_(data, tensors, offsets, cast.scale)
        return
    values = torch.zeros(numel, dtype=torch.float32, device=message.device)
    reference.pack_(values, tensors, offsets, cast.scale)
    for start, stop, first_index in runs_of(numel, tensors, offsets, first_indices):
        for piece in _pieces(start, stop):
            index = first_index + piece.start - start
            _encode_(message, values[piece], layout, cast, piece.start, index)


def unpack_message_(
    tensors: Sequence[torch.Tensor],
    message: torch.Tensor,
    format: str,
    numel: int,
    offsets: Sequence[int],
    *options: Any,
) -> None:
    """Fill each of `tensors` from messages of `numel` elements each, from its offset on.

    options: scale, accumulate, row_numel.
    """
    scale, accumulate, row_numel = options
    layout = layout_of_numel(format, numel, row_numel=row_numel)
    rows = message.view(-1, layout.num_bytes).unbind()
    made = whole_or_flat(tensors, offsets, numel)
    shares = shares_of(made, offsets, offsets, numel, len(rows))
    values = torch.empty(numel, dtype=torch.float32, device=message.device)
    for row, share in zip(rows, shares, strict=True):
        if share.tensors:
            for piece in _pieces(0, numel):
                decode_(values[piece], row, layout, piece.start)
            reference.unpack_(share.tensors, values, share.offsets, scale, accumulate)
    for tensor, flat in zip(tensors, made, strict=True):
        if not (tensor.is_contiguous() or flat is tensor):
            tensor.copy_(flat.view(tensor.shape))


def reduce_messages_(
    out: torch.Tensor,
    messages: torch.Tensor,
    format: str,
    scale: float = 1.0,
    accumulate: bool = False,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> None:
    """Sum the rows of `messages` [world, bytes] into `out`, which shares no memory with them."""
    reduce_peer_messages_(out, messages.unbind(), format, scale, accumulate, row_numel)


def reduce_peer_messages_(
    out: torch.Tensor,
    messages: Sequence[torch.Tensor],
    format: str,
    scale: float = 1.0,
    accumulate: bool = False,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> None:
    """Sum `messages`, each 1-D bytes, in their order into `out`."""
    numel = out.numel()
    layout = layout_of_numel(format, numel, row_numel=row_numel)
    for part in _pieces(0, numel):
        piece = out[part]
        total = torch.empty_like(piece, dtype=torch.float32)
        decode_(total, messages[0], layout, part.start)
        values = torch.empty_like(total)
        for message in messages[1:]:
            decode_(values, message, layout, part.start)
            total.add_(values)
        reference.reduce_(piece, total.unsqueeze(0), scale, accumulate)


def decode_(values: torch.Tensor, message: torch.Tensor, layout: MessageLayout, start: int) -> None:
    """Fill the FP32 `values` with the elements of a message from `start` on.

    Values begin and end where a row of the message does.
    """
    form = layout.format
    data, scales, row_scales = sections_of(message, layout, start, values.numel())
    if isinstance(form, WireFormat):
        values.copy_(elements_of(data, form.dtype))
        return
    blocks = in_blocks(values, form, layout.row_numel)
    factors = factors_of(scales, row_scales, form)
    made = codes.loaded(data, form.element).view(blocks.shape)
    torch.mul(made, factors.unsqueeze(-1), out=blocks)


def factors_of(scales: torch.Tensor, row_scales: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """What codes are multiplied by, FP32 [rows, blocks], of the bytes that `sections_of` gives."""
    stored = rows = None
    if form.has_rows:
        rows = elements_of(row_scales, torch.float32).view(-1, 1)
    if form.block_numel is not None:
        is_fp32 = form.scale_dtype is torch.float32
        stored = elements_of(scales, torch.float32) if is_fp32 else scales
        stored = stored.view(1 if rows is None else len(rows), -1)
    assert form.codec is not None
    made: torch.Tensor = named(form.codec.definition, "factors_of")(stored, rows)
    return made


def aligned_memory(message: torch.Tensor) -> torch.Tensor:
    """`message`, if its sections can be accessed as what they hold, else as much new memory."""
    if is_aligned(message) and message.storage_offset() % ACCESS_BYTES == 0:
        return message
    return torch.empty_like(message)


def runs_of(
    numel: int,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    first_indices: Sequence[int],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, index of the element at start): the vector, cut where indices do not go on."""
    filled = sorted(
        (offset, first_index)
        for tensor, offset, first_index in zip(tensors, offsets, first_indices, strict=True)
        if tensor.numel()
    )
    # What is before the first tensor is zeros, which no noise changes.
    start, index = 0, max(0, filled[0][1] - filled[0][0]) if filled else 0
    for offset, first_index in filled:
        if first_index != index + offset - start:
            if offset > start:
                yield start, offset, index
            start, index = offset, first_index
    yield start, numel, index


def _pieces(start: int, stop: int) -> Iterator[slice]:
    """Parts whose temporaries fit in a cache, of whole rows."""
    step = reference.CHUNK_NUMEL * torch.get_num_threads()
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def _encode_(
    message: torch.Tensor,
    values: torch.Tensor,
    layout: MessageLayout,
    cast: MessageCast,
    start: int,
    first_index: int,
) -> None:
    """Write codes and scales of the FP32 `values`, the elements of the message from `start` on."""
    form, noise = layout.format, None
    data, *sections = sections_of(message, layout, start, values.numel())
    if cast.seed is not None:
        noise = noise_bits(cast.seed, first_index, values.numel(), values.device)
    if isinstance(form, BlockFormat):
        blocks = in_blocks(values, form, layout.row_numel)
        factors = write_scales_(sections, codes.amax_of(blocks), form, cast)
        values = (blocks * factors.unsqueeze(-1)).view(-1)
    data.copy_(codes.stored(values, form.element, noise).view(torch.uint8))


def write_scales_(
    sections: Sequence[torch.Tensor], amax: torch.Tensor, form: BlockFormat, cast: MessageCast
) -> torch.Tensor:
    """What blocks with this amax, FP32 [rows, blocks], are multiplied by, its scales written.

    sections: the bytes of scales and of row scales that `sections_of` gives.
    """
    assert form.codec is not None
    rule = rule_of(form, cast.rule, cast.power_of_2)
    factors: torch.Tensor
    factors, *made = named(form.codec.definition, "scales_of")(amax, form, rule)
    for section, scales in zip(sections, made, strict=True):
        if scales is not None:
            section.copy_(scales.reshape(-1).view(torch.uint8))
    return factors


def in_blocks(values: torch.Tensor, form: BlockFormat, row_numel: int) -> torch.Tensor:
    """`values` as [rows, blocks, elements of one]; where rows have no scales, as one row."""
    num_rows = values.numel() // row_numel if form.has_rows else 1
    block_numel = form.block_numel or row_numel
    return values.view(num_rows, values.numel() // (num_rows * block_numel), block_numel)


def sections_of(
    message: torch.Tensor, layout: MessageLayout, start: int, numel: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of the codes, scales and row scales of `numel` elements from `start` on.

    Both begin and end where a row does; of what the format has not there are no bytes.
    """
    form, bits = layout.format, layout.format.element.stored_bits
    data = _section(message, layout.data_at, start * bits, numel * bits)
    scales, row_scales = data[:0], data[:0]
    if isinstance(form, BlockFormat) and form.block_numel is not None:
        bits = form.scale_dtype.itemsize * BITS_PER_BYTE
        first, count = start // form.block_numel, numel // form.block_numel
        scales = _section(message, layout.scales_at, first * bits, count * bits)
    if form.has_rows:
        first, count = start // layout.row_numel, numel // layout.row_numel
        row_scales = _section(message, layout.row_scales_at, first * _FP32_BITS, count * _FP32_BITS)
    return data, scales, row_scales


def _section(message: torch.Tensor, at: int, first_bit: int, num_bits: int) -> torch.Tensor:
    """The bytes of a part of the section that begins at byte `at`."""
    return message[at + first_bit // BITS_PER_BYTE :][: num_bits // BITS_PER_BYTE]


def elements_of(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers, by way of a copy where they do not lie as such numbers may."""
    if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype)
