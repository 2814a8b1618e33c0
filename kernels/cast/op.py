"""The plain casts, `cast` and `cast_back`: what they accept, and the ops behind them.

| to, from | public dtype   | nearest             | stochastic | too large            | NaN      |
|----------|----------------|---------------------|------------|----------------------|----------|
| bf16     | bfloat16       | even                | yes        | inf; stochastic: max | NaN      |
| fp16     | float16        | even                | no         | infinity             | NaN      |
| e4m3     | float8_e4m3fn  | even, saturating    | yes        | +-448, infinity too  | 0x7F     |
| e5m2     | float8_e5m2    | even, saturating    | yes        | +-57344, infinity too| 0x7F     |
| e2m1     | uint8, 2 codes | even, saturating    | yes        | +-6, infinity too    | +6       |
| e8m0     | float8_e8m0fnu | power of two of |x| | no         | 2^127; infinity: 255 | 255      |
| e4m3fnuz | .._e4m3fnuz    | even, saturating    | yes        | +-240, infinity too  | 0x80     |

Bytes moved an element: those of the source and those of the result, 0.5 of e2m1. FP8 codes come
from the hardware from Hopper on and from arithmetic elsewhere, of the same bits: see `codes` for
all of the rule and `noise` for what stochastic rounding draws. Neither op is differentiable.
"""

from __future__ import annotations

import torch

from ..arguments import check_rows, check_source, result_of
from ..checks import check_choice, check_contiguous, check_dtype, check_result_dtype
from ..formats.noise import Seed, check_first_index, checked_seed
from ..formats.table import CASTS
from ..numbers import tensor_of
from ..op import Op, call, on_first_use
from . import reference
from .reference import has_pairs

_CAST = Op(
    "cast_(Tensor(a!) out, Tensor x, str to, SymInt? seed, SymInt first_index, *, "
    "Tensor? seed_tensor=None) -> ()",
    reference.cast_,
    on_first_use("cast.kernel", "cast_"),
)
_CAST_BACK = Op(
    "cast_back_(Tensor(a!) out, Tensor codes, str from_) -> ()",
    reference.cast_back_,
    on_first_use("cast.kernel", "cast_back_"),
)


def cast(
    x: torch.Tensor,
    to: str,
    *,
    rounding: str = "nearest",
    seed: Seed | None = None,
    first_index: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x` in the format `to`: of its shape, or for e2m1 [..., ceil(n / 2)], two elements a byte.

    x: FP32, BF16 or FP16, contiguous, any shape. rounding: "nearest", or "stochastic" with `seed`,
    any 64 bits as an integer from -2^63 to 2^64 - 1, or as an int64 tensor of one element on the
    device of `x`, which is read there. first_index: where element 0 of `x` lies in the whole
    tensor, so that a shard gets the bits it would get as part of it; no index exceeds 2^63 - 1.
    out: memory for the result, apart from that of what is read. Raises `ValueError` before anything
    is written.
    """
    check_choice("to", to, CASTS)
    check_source("x", x)
    seed = checked_seed(rounding, seed, x.device)
    if seed is not None and not CASTS[to].has_stochastic:
        known = ", ".join(name for name, form in CASTS.items() if form.has_stochastic)
        raise ValueError(
            f"to: expected one of {known} to round stochastically, got {to!r}; round to nearest"
        )
    check_first_index(first_index, x.numel())
    shape = _paired_shape(x.shape) if has_pairs(to) else x.shape
    out = result_of(out, (shape, CASTS[to].dtype), x.device, {"x": x, "seed": tensor_of(seed)})
    if x.numel():
        call(_CAST, out, out, x, to, seed, first_index)
    return out


def cast_back(
    codes: torch.Tensor,
    from_: str,
    dtype: torch.dtype = torch.float32,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values of `codes`, in the format `from_`, as FP32, BF16 or FP16: of their shape.

    For e2m1 it is [..., 2 * n], the odd end of a row with the 0 that `cast` put there. Exact in
    FP32; the others round to nearest even, too large being infinity as IEEE 754 has it. out: memory
    for the result, of `dtype`, apart from that of `codes`. Raises `ValueError` before anything is
    written.
    """
    check_choice("from_", from_, CASTS)
    check_dtype("codes", codes, (CASTS[from_].dtype,))
    check_contiguous("codes", codes)
    check_result_dtype(dtype)
    shape = codes.shape
    if has_pairs(from_):
        check_rows("codes", codes)
        shape = torch.Size((*shape[:-1], 2 * shape[-1]))
    out = result_of(out, (shape, dtype), codes.device, {"codes": codes})
    if codes.numel():
        call(_CAST_BACK, out, out, codes, from_)
    return out


def _paired_shape(shape: torch.Size) -> torch.Size:
    """Two elements of a row a byte; a single number makes a byte of its own."""
    return torch.Size((*shape[:-1], -(-shape[-1] // 2))) if shape else torch.Size((1,))
