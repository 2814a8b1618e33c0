"""What casts and quantisers check alike, and the memory that their results get.

Sources are contiguous and FP32, BF16 or FP16. Blocks run along the rows of a tensor [..., K], and
the last one of a row may be short. Results are new memory, or what the caller gives as `out`, which
nothing else of the call shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .aliasing import check_apart
from .checks import (
    SOURCE_DTYPES,
    check_contiguous,
    check_count,
    check_dtype,
    check_integer,
    check_like,
    check_result_dtype,
)
from .formats.swizzle import swizzled_numel

Wanted = tuple[Sequence[int], torch.dtype]
"""The shape and dtype of a result."""

# GPU kernels count the blocks of a row with 31 bits where rows are not all one.
_MAX_ROW_BLOCKS = 2**30


def check_source(name: str, tensor: torch.Tensor) -> None:
    """Raise unless it is a contiguous tensor of a source's dtype."""
    check_dtype(name, tensor, SOURCE_DTYPES)
    check_contiguous(name, tensor)


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` unless the tensor is [..., K]."""
    if tensor.dim() == 0:
        raise ValueError(f"{name}: expected at least 1 dimension, got shape (); call .view(1)")


def check_row_blocks(name: str, num_blocks: int) -> None:
    """Raise `ValueError` where a row has more blocks than a kernel can count."""
    if num_blocks > _MAX_ROW_BLOCKS:
        raise ValueError(
            f"{name}: expected at most {_MAX_ROW_BLOCKS} blocks a row where the last one is short "
            f"or scales are swizzled, got {num_blocks}; cut the rows"
        )


def checked_row_numel(data: torch.Tensor, row_numel: int | None, codes_a_byte: int) -> int:
    """The elements of a row of `data` [..., bytes]: `row_numel`, if it is given and may be."""
    high = data.shape[-1] * codes_a_byte
    if row_numel is None:
        return high
    return check_integer("row_numel", row_numel, max(high - codes_a_byte + 1, 0), high)


def scale_shape(outer: torch.Size, num_blocks: int, swizzled: bool) -> tuple[int, ...]:
    """The shape of one-byte scales: a row's blocks for every row of `outer`, or swizzled, 1-D."""
    return (swizzled_numel(outer.numel(), num_blocks),) if swizzled else (*outer, num_blocks)


def result_dtype(dtype: torch.dtype, out: torch.Tensor | None) -> torch.dtype:
    """That of `out` where it is given, else `dtype`; both must be a source's."""
    check_result_dtype(dtype)
    if out is None:
        return dtype
    check_dtype("out", out, SOURCE_DTYPES)
    return out.dtype


def result_of(
    out: torch.Tensor | None,
    wanted: Wanted,
    device: torch.device,
    sources: Mapping[str, torch.Tensor | None],
) -> torch.Tensor:
    """Memory for a result: `out`, if given, of that shape and dtype, apart from the sources."""
    shape, dtype = wanted
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    check_like("out", out, shape, dtype, device)
    check_apart({"out": out}, sources)
    return out


def results_of(
    out: Sequence[torch.Tensor] | None,
    wanted: Sequence[Wanted],
    device: torch.device,
    sources: Mapping[str, torch.Tensor | None],
    name: str = "out",
) -> tuple[torch.Tensor, ...]:
    """`result_of` for several, which are apart from each other as well."""
    if out is None:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in wanted)
    check_count(name, out, len(wanted))
    named = {f"{name}[{index}]": tensor for index, tensor in enumerate(out)}
    for (part, tensor), (shape, dtype) in zip(named.items(), wanted, strict=True):
        check_like(part, tensor, shape, dtype, device)
    check_apart(named, sources)
    return tuple(out)
