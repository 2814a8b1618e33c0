"""Packing and sums in plain PyTorch: their definition, the kernels' oracle, and the CPU path.

    pack_    flat[o : o + n] = round(float32(tensor) * scale)          for every (tensor, o)
    unpack_  tensor          = round(float32(flat[o : o + n]) * scale)
    reduce_  out             = round((part 0 + part 1 + ...) * scale)  in FP32, in rank order

With `accumulate` the old value joins in FP32 before the one rounding: round(float32(old) + new).
Everything is elementwise, so no result depends on how the work is cut into chunks or threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

# Conversions need scratch memory; working in chunks keeps it in the second-level cache.
# bf16 -> bf16 with a scale, 8 Mi elements, one core of an AMD EPYC 7003: 56 ms whole, 10.0 ms in
# chunks of 32 Ki elements, 7.5 ms of 64 Ki, 7.5 ms of 128 Ki, 7.7 ms of 256 Ki (a plain copy: 2.8).
CHUNK_NUMEL = 128 * 1024
# From here on, adding small rows one by one costs more calls than arithmetic.
MANY_ROWS = 16


def pack_(
    flat: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Write each of `tensors` into the 1-D `flat`, row-major, from its offset (in elements) on."""
    move_(_slots(flat, tensors, offsets), tensors, scale, accumulate)


def unpack_(
    tensors: Sequence[torch.Tensor],
    flat: torch.Tensor,
    offsets: Sequence[int],
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Fill each of `tensors` from the 1-D `flat`, row-major, from its offset (in elements) on."""
    move_(tensors, _slots(flat, tensors, offsets), scale, accumulate)


def reduce_(
    out: torch.Tensor,
    parts: torch.Tensor | None,
    scale: float = 1.0,
    accumulate: bool = False,
    rows: Sequence[torch.Tensor] | None = None,
) -> None:
    """Sum `parts` [world, shard] over ranks into `out` [shard], which shares no memory with it.

    rows: `parts.unbind()`, from a caller who has it at hand, or what has no table.
    """
    if rows is None:
        assert parts is not None
        rows = parts.unbind()
    numel, chunk = out.numel(), _chunk_numel()
    if rows[0].numel() != numel:  # torch would resize `out`
        raise ValueError(
            f"out: expected {rows[0].numel()} elements, a row of parts, got {numel}; pass memory "
            "of that size"
        )
    if len(rows) >= MANY_ROWS and len(rows) * numel <= CHUNK_NUMEL:
        parts = torch.stack(tuple(rows)) if parts is None else parts
        _reduce_many_rows_(out, parts, scale, accumulate)
    elif numel <= chunk:
        _reduce_chunk_(out, rows, scale, accumulate)
    else:
        for start in range(0, numel, chunk):
            piece = slice(start, min(start + chunk, numel))
            _reduce_chunk_(out[piece], [row[piece] for row in rows], scale, accumulate)


def _slots(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], offsets: Sequence[int]
) -> list[torch.Tensor]:
    """One view of `flat` per tensor, in the tensor's shape."""
    base = flat.storage_offset()
    view = flat.as_strided  # one dispatch a tensor, where slicing and viewing take three
    return [
        view(
            tensor.shape,
            tensor.stride() if tensor.is_contiguous() else _row_major(tensor.shape),
            base + offset,
        )
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def _row_major(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _chunk_numel() -> int:
    return CHUNK_NUMEL * torch.get_num_threads()


def move_(
    destinations: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    scale: float,
    accumulate: bool,
) -> None:
    """destinations (+)= sources * scale, for lists of tensors of equal shapes.

    Small tensors share calls, as the host's time counts.
    """
    destinations, sources = list(destinations), list(sources)
    if not sources:
        return
    if scale == 1.0 and not accumulate:
        torch._foreach_copy_(destinations, sources)
        return
    factor = _factor(scale)
    shared_calls = sum(source.numel() for source in sources) <= CHUNK_NUMEL and all(
        destination.dtype is torch.float32 for destination in destinations
    )
    if shared_calls and not accumulate:
        torch._foreach_copy_(destinations, sources)
        torch._foreach_mul_(destinations, factor)
    elif shared_calls and scale == 1.0:
        torch._foreach_add_(destinations, sources)
    else:
        for destination, source in zip(destinations, sources, strict=True):
            _move_(destination, source, None if scale == 1.0 else factor, accumulate)


def _factor(scale: float) -> torch.Tensor:
    """`scale` in FP32, as a tensor: a Python number would be wrapped anew at every use."""
    if torch._C._len_torch_dispatch_stack():
        return _signed_factor.__wrapped__(scale, 1.0)  # a mode's own kind of tensor: not to be kept
    # Zeros of both signs are equal, so a cache needs the sign to tell them apart.
    return _signed_factor(scale, math.copysign(1.0, scale))


@functools.lru_cache(maxsize=256)
def _signed_factor(scale: float, _sign: float) -> torch.Tensor:
    return torch.tensor(scale, dtype=torch.float32, device="cpu")


def _move_(
    destination: torch.Tensor,
    source: torch.Tensor,
    factor: torch.Tensor | None,
    accumulate: bool,
) -> None:
    """destination (+)= source * factor, for two tensors of one shape."""
    numel, chunk = source.numel(), _chunk_numel()
    if numel <= chunk or not (destination.is_contiguous() and source.is_contiguous()):
        _move_chunk_(destination, source, factor, accumulate)
        return
    destination, source = destination.view(-1), source.view(-1)
    for start in range(0, numel, chunk):
        piece = slice(start, min(start + chunk, numel))
        _move_chunk_(destination[piece], source[piece], factor, accumulate)


def _move_chunk_(
    destination: torch.Tensor,
    source: torch.Tensor,
    factor: torch.Tensor | None,
    accumulate: bool,
) -> None:
    values = source.float()
    if factor is not None:
        if destination.dtype is torch.float32 and not accumulate:
            torch.mul(values, factor, out=destination)
            return
        values = values * factor
    _store_(destination, values, accumulate)


def _reduce_chunk_(
    out: torch.Tensor, rows: Sequence[torch.Tensor], scale: float, accumulate: bool
) -> None:
    total = _total_for(out, accumulate)
    if len(rows) > 1 and rows[0].dtype is torch.float32:
        torch.add(rows[0], rows[1], out=total)
        rest = rows[2:]
    else:
        total.copy_(rows[0])
        rest = rows[1:]
    for row in rest:
        total.add_(row)
    _finish_(out, total, scale, accumulate)


def _reduce_many_rows_(
    out: torch.Tensor, parts: torch.Tensor, scale: float, accumulate: bool
) -> None:
    """One call for all rows: on a CPU `index_add_` adds row after row, in the order of its index.

    1024 rows of 128 FP32 elements: 72 us, and 4.9 ms by a call a row. Larger rows are the other way
    round, since `index_add_` is slower an element.
    """
    total = _total_for(out, accumulate)
    total.copy_(parts[0])
    index = torch.zeros(len(parts) - 1, dtype=torch.int64, device=out.device)
    total.view(1, -1).index_add_(0, index, parts[1:].float())
    _finish_(out, total, scale, accumulate)


def _total_for(out: torch.Tensor, accumulate: bool) -> torch.Tensor:
    """An FP32 tensor to sum in: `out` itself where nothing is left to do with the sum."""
    in_place = out.dtype is torch.float32 and not accumulate
    return out if in_place else torch.empty_like(out, dtype=torch.float32)


def _finish_(out: torch.Tensor, total: torch.Tensor, scale: float, accumulate: bool) -> None:
    if scale != 1.0:
        total.mul_(_factor(scale))
    if total is not out:
        _store_(out, total, accumulate)


def _store_(destination: torch.Tensor, values: torch.Tensor, accumulate: bool) -> None:
    """Round FP32 `values` into `destination`; the mixed add works in FP32 and rounds once."""
    if accumulate:
        destination.add_(values)
    else:
        destination.copy_(values)
