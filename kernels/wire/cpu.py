"""Wire messages on a CPU: the bits of `reference`, by chunks of which a cache holds all.

    pack     tensors -> FP32 chunk -> scales, and the chunk times them -> codes
    unpack   codes -> FP32 chunk, times scales -> tensors
    sum      as unpack, added to a chunk of sums

`formats.cpu_codes` converts elements and `formats.cpu_noise` draws noise; scales, one for 16
elements or more, are those of the codec's definition. No pass over a chunk leaves the cache but the
first and the last, and nothing but the message and the tensors is as long as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..formats import cpu_codes
from ..formats.cpu_codes import Scratch
from ..formats.cpu_noise import Noise
from ..formats.table import BITS_PER_BYTE, BlockFormat, WireFormat
from ..pack import reference as packing
from . import reference
from .layout import DEFAULT_ROW_NUMEL, MessageLayout, layout_of_numel, write_header
from .reference import (
    MessageCast,
    elements_of,
    factors_of,
    in_blocks,
    runs_of,
    sections_of,
    write_scales_,
)
from .shares import Share, shares_of

CHUNK_NUMEL = 512 * 1024
"""Elements of a chunk, for each thread: a multiple of rows of every length.

A quarter of it stays in 2 MiB of cache, but then calls cost more than arithmetic: packing took 5.7
ns an element of MXFP8 and 9.6 of NVFP4, where this takes 4.0 and 7.8, and decoding 2.5 and 3.5 in
place of 2.1 and 2.2 (one core of a Xeon with 2 MiB of L2, minima of 12).
"""

NOISE_NUMEL = 128 * 1024
"""Elements of a chunk that are rounded with noise at once, for each thread: here arithmetic counts,
and what it goes over stays in the cache.
"""


def pack_message_(
    message: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    numel: int,
    offsets: Sequence[int],
    first_indices: Sequence[int],
    *options: Any,
) -> None:
    """`reference.pack_message_`."""
    cast = MessageCast(*options)
    layout = layout_of_numel(format, numel, row_numel=cast.row_numel)
    if cast.seed is None and isinstance(layout.format, WireFormat):
        reference.pack_message_(message, tensors, format, numel, offsets, first_indices, *options)
        return
    flat = [tensor.reshape(-1) for tensor in tensors]
    rows = message.view(-1, layout.num_bytes).unbind()
    shares = shares_of(flat, offsets, first_indices, numel, len(rows))
    noise = None if cast.seed is None else Noise(cast.seed)
    scratch = Scratch(_step(numel))
    for row, share in zip(rows, shares, strict=True):
        row[layout.scales_end : layout.row_scales_at].zero_()
        row[layout.row_scales_end :].zero_()
        write_header(row, layout)
        for start, chunk in _chunks(share, numel):
            count = min(_step(numel), numel - start)
            values = _gathered(chunk, count, cast.scale, layout, scratch)
            drawn = None if noise is None else _Drawn(noise, list(runs_of(count, *chunk)))
            _encode_(sections_of(row, layout, start, count), values, drawn, layout, cast, scratch)


def unpack_message_(
    tensors: Sequence[torch.Tensor],
    message: torch.Tensor,
    format: str,
    numel: int,
    offsets: Sequence[int],
    *options: Any,
) -> None:
    """`reference.unpack_message_`."""
    scale, accumulate, row_numel = options
    is_plain = scale == 1.0 and not accumulate
    layout = layout_of_numel(format, numel, row_numel=row_numel)
    flat = [tensor.reshape(-1) for tensor in tensors]
    rows = message.view(-1, layout.num_bytes).unbind()
    scratch = Scratch(_step(numel))
    for row, share in zip(rows, shares_of(flat, offsets, offsets, numel, len(rows)), strict=True):
        for start, chunk in _chunks(share, numel):
            count = min(_step(numel), numel - start)
            whole = _whole(chunk, count) if is_plain else None
            is_done = whole is not None and _decode_whole_(whole, row, layout, start, scratch)
            if chunk.tensors and not is_done:
                values = scratch.values[:count]
                _decode_(values, row, layout, start, scratch)
                packing.unpack_(chunk.tensors, values, chunk.offsets, scale, accumulate)
    for tensor, made in zip(tensors, flat, strict=True):
        if made.data_ptr() != tensor.data_ptr():
            tensor.copy_(made.view(tensor.shape))


def reduce_messages_(
    out: torch.Tensor, messages: torch.Tensor, format: str, *options: Any, **by_name: Any
) -> None:
    """`reference.reduce_messages_`."""
    reduce_peer_messages_(out, messages.unbind(), format, *options, **by_name)


def reduce_peer_messages_(
    out: torch.Tensor,
    messages: Sequence[torch.Tensor],
    format: str,
    scale: float = 1.0,
    accumulate: bool = False,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> None:
    """`reference.reduce_peer_messages_`."""
    numel = out.numel()
    layout = layout_of_numel(format, numel, row_numel=row_numel)
    step = _step(numel)
    scratch, sums = Scratch(step), torch.empty(step, dtype=torch.float32, device="cpu")
    in_place = scale == 1.0 and not accumulate
    for start in range(0, numel, step):
        piece = out[start : start + step]
        in_place = in_place and _has_pairs(piece)
        total, values = piece if in_place else sums[: len(piece)], scratch.values[: len(piece)]
        _decode_(total, messages[0], layout, start, scratch)
        for message in messages[1:]:
            _decode_(values, message, layout, start, scratch)
            total.add_(values)
        if not in_place:
            packing.move_([piece], [total], scale, accumulate)


def _step(numel: int) -> int:
    """Elements of a chunk in a vector of `numel`: whole rows of every length."""
    return min(max(numel, 1), CHUNK_NUMEL * torch.get_num_threads())


def _chunks(share: Share, numel: int) -> Iterator[tuple[int, Share]]:
    """Where in a message each chunk begins, and what tensors have of it, all of them 1-D."""
    starts = range(0, numel, _step(numel))
    return zip(starts, shares_of(*share, _step(numel), len(starts)), strict=True)


def _whole(chunk: Share, numel: int) -> torch.Tensor | None:
    """The one tensor that is all of the chunk, if there is one."""
    if len(chunk.tensors) != 1:
        return None
    (tensor,) = chunk.tensors
    return tensor if tensor.numel() == numel and tensor.is_contiguous() else None


def _has_pairs(values: torch.Tensor) -> bool:
    """Whether `values` are FP32 whose pairs can be written as one number each."""
    return (
        values.dtype is torch.float32
        and values.storage_offset() % 2 == 0
        and values.data_ptr() % torch.int64.itemsize == 0
    )


def _gathered(
    chunk: Share, numel: int, scale: float, layout: MessageLayout, scratch: Scratch
) -> torch.Tensor:
    """The chunk in FP32, times `scale`, zeros where there is no tensor; blocks are not written."""
    whole = _whole(chunk, numel) if scale == 1.0 else None
    if (
        whole is not None
        and whole.dtype is torch.float32
        and isinstance(layout.format, BlockFormat)
    ):
        return whole
    values = scratch.values[:numel]
    if sum(tensor.numel() for tensor in chunk.tensors) < numel:
        values.zero_()
    packing.pack_(values, chunk.tensors, chunk.offsets, scale)
    return values


class _Drawn(NamedTuple):
    """The noise of a chunk's elements; `runs` of them are numbered one after the other."""

    noise: Noise
    runs: list[tuple[int, int, int]]

    def draw_(self, made: torch.Tensor, at: int) -> None:
        """Fill `made` with that of the chunk's elements from `at` on."""
        for start, stop, first_index in self.runs:
            first, last = max(start, at), min(stop, at + made.numel())
            if first < last:
                self.noise.draw_(made[first - at : last - at], first_index + first - start)


def _encode_(
    sections: Sequence[torch.Tensor],
    values: torch.Tensor,
    drawn: _Drawn | None,
    layout: MessageLayout,
    cast: MessageCast,
    scratch: Scratch,
) -> None:
    """Write the codes and scales of the FP32 `values` into their sections."""
    form, (data, *scales) = layout.format, sections
    if isinstance(form, BlockFormat):
        blocks = in_blocks(values, form, layout.row_numel)
        amax = cpu_codes.amax_of(blocks, scratch)
        factors = write_scales_(scales, amax, form, cast)
        values = scratch.values[: values.numel()]
        torch.mul(blocks, factors.unsqueeze(-1), out=values.view(blocks.shape))
    if drawn is None:
        cpu_codes.store_(data, values, form.element, None, scratch)
        return
    bits, step = form.element.stored_bits, NOISE_NUMEL * torch.get_num_threads()
    for at in range(0, values.numel(), step):
        part = values[at : at + step]
        noise = scratch.noise[: part.numel()]
        drawn.draw_(noise, at)
        stored = data[at * bits // BITS_PER_BYTE :][: part.numel() * bits // BITS_PER_BYTE]
        cpu_codes.store_(stored, part, form.element, noise, scratch)


def _decode_whole_(
    whole: torch.Tensor, message: torch.Tensor, layout: MessageLayout, start: int, scratch: Scratch
) -> bool:
    """As `_decode_` and a copy, into a tensor that is all of a chunk, if there is a way."""
    if _has_pairs(whole):
        _decode_(whole, message, layout, start, scratch)
        return True
    form = layout.format
    if whole.dtype is not torch.bfloat16 or not isinstance(form, BlockFormat) or not form.has_rule:
        return False
    data, scales, _ = sections_of(message, layout, start, whole.numel())
    blocks = in_blocks(whole, form, layout.row_numel).squeeze(0)
    return cpu_codes.load_bf16_(blocks, data, scales, form.element, scratch)


def _decode_(
    values: torch.Tensor, message: torch.Tensor, layout: MessageLayout, start: int, scratch: Scratch
) -> None:
    """Fill the FP32 `values` with the elements of the message from `start` on."""
    form = layout.format
    data, scales, row_scales = sections_of(message, layout, start, values.numel())
    if isinstance(form, WireFormat):
        values.copy_(elements_of(data, form.dtype))
        return
    cpu_codes.load_(values, data, form.element, scratch)
    blocks = in_blocks(values, form, layout.row_numel)
    blocks.mul_(factors_of(scales, row_scales, form).unsqueeze(-1))
