"""Grouped casts: what they accept, and the ops behind them.

For mixtures of experts: the rows of a matrix are sorted by group, and where groups end is known on
the device alone, so that no host waits. A group's result is that of the single cast of its rows.
`reference` has the layout of scales, and what becomes of rows that belong to no group, and of ends
that are wrong. The ops write in place; nothing is differentiable.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ..aliasing import PLAIN_TYPES
from ..arguments import check_row_blocks, check_source, result_of, results_of
from ..checks import check_choice, check_device, check_dtype, check_flag, check_like, check_vector
from ..formats.noise import Seed, check_first_index, checked_seed
from ..formats.table import E2M1, E4M3, ELEMENTS, MXFP8, NVFP4, SCALE_RULES
from ..fp8.reference import CAST_ELEMENTS
from ..mx.op import as_bytes
from ..mx.reference import elements
from ..numbers import tensor_of
from ..op import Op, call, on_first_use
from . import reference

MAX_GROUPS = 1024
_MAX_ROWS = 2**31 - 1  # kernels count rows and tiles of them with 31 bits
_END_DTYPES = (torch.int32, torch.int64)
_MATRIX_DIMS = 2

_QUANTIZE_FP8 = Op(
    "quantize_fp8_grouped_(Tensor(a!) codes, Tensor(b!) scale_inv, Tensor x, Tensor ends, "
    "bool power_of_2) -> ()",
    reference.quantize_fp8_grouped_,
    on_first_use("grouped.two_pass", "quantize_fp8_grouped_"),
)
_AMAX = Op(
    "amax_nvfp4_grouped_(Tensor(a!) amaxes, Tensor x, Tensor ends) -> ()",
    reference.amax_nvfp4_grouped_,
    on_first_use("grouped.two_pass", "amax_nvfp4_grouped_"),
)
_QUANTIZE_MX = Op(
    "quantize_mx_grouped_(Tensor(a!) data, Tensor(b!) scales, Tensor x, Tensor ends, str element, "
    "str rule, SymInt? seed, SymInt first_index, *, Tensor? seed_tensor=None) -> ()",
    reference.quantize_mx_grouped_,
    on_first_use("grouped.kernel", "quantize_mx_grouped_"),
)
_QUANTIZE_NVFP4 = Op(
    "quantize_nvfp4_grouped_(Tensor(a!) data, Tensor(b!) scales, Tensor x, Tensor ends, "
    "Tensor amaxes, SymInt? seed, SymInt first_index, *, Tensor? seed_tensor=None) -> ()",
    reference.quantize_nvfp4_grouped_,
    on_first_use("grouped.kernel", "quantize_nvfp4_grouped_"),
)


def quantize_fp8_grouped(
    x: torch.Tensor,
    ends: torch.Tensor,
    *,
    element: str = "e4m3",
    power_of_2: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale_inv) of `x` [rows, K]: FP8 of its shape, and FP32 [groups], a scale a group.

    Of each group, `quantize_fp8(rows, element=..., power_of_2=...)`; an empty one has scale 1.
    x: FP32, BF16 or FP16, contiguous. ends: int32 or int64 [groups], on its device, 1 to 1024 of
    them: where each group's rows end, in ascending order, as `torch.nn.functional.grouped_mm` takes
    `offs`; of offsets [groups + 1] pass `offsets[1:]`. Ends that are out of order or beyond the
    rows raise `ValueError` on a CPU; a GPU, and what torch.compile makes, where no host looks, make
    all codes and scales NaN. Rows from the last end on have the code of NaN. Bytes moved an element
    of BF16: 5.

    out: memory for the results, contiguous, apart from all else. Raises `ValueError` before
    anything is written.
    """
    check_choice("element", element, CAST_ELEMENTS)
    power_of_2 = check_flag("power_of_2", power_of_2)
    _check_grouped(x, ends)
    wanted = (x.shape, CAST_ELEMENTS[element].dtype), (ends.shape, torch.float32)
    codes, scale_inv = results_of(out, wanted, x.device, {"x": x, "ends": ends})
    call(_QUANTIZE_FP8, x, codes, scale_inv, x, ends, power_of_2)
    return codes, scale_inv


def quantize_mx_grouped(
    x: torch.Tensor,
    ends: torch.Tensor,
    *,
    element: str = "e4m3",
    rule: str = "rceil",
    rounding: str = "nearest",
    seed: Seed | None = None,
    first_index: int = 0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, scales) of `x` [rows, K]: MXFP8 or MXFP4, every group with swizzled scales of its own.

    Of each group, `quantize_mx(rows, ..., swizzled=True)`, which has the other arguments; an
    element's noise is that of its index in the whole matrix. x, ends, out: as for
    `quantize_fp8_grouped`. Without swizzled scales blocks know of no group: use `quantize_mx`.

    data: float8 [rows, K], or for "e2m1" uint8 [rows, ceil(K / 2)]. scales: float8_e8m0fnu, 1-D,
    each group's 128x4 tiles behind those of the group before, memory being there for
    (rows + 127 * min(groups + 1, rows)) // 128 rows of tiles; `scales.view(-1, 4 * ceil(K / 128))`
    is what `torch.nn.functional.scaled_grouped_mm` takes. What no group has is NaN, 255. Bytes
    moved an element of BF16: 3.03, or 2.53 for e2m1. Raises `ValueError` before anything is
    written.
    """
    check_choice("element", element, elements())
    check_choice("rule", rule, SCALE_RULES)
    _check_grouped(x, ends)
    seed = checked_seed(rounding, seed, x.device)
    check_first_index(first_index, x.numel())
    form = ELEMENTS[element]
    row = -(-x.shape[1] // form.codes_per_byte)
    num_scales = _num_scales(x, ends, MXFP8.num_blocks(x.shape[1]))
    wanted = ((x.shape[0], row), form.dtype), ((num_scales,), MXFP8.scale_dtype)
    data, scales = results_of(
        out, wanted, x.device, {"x": x, "ends": ends, "seed": tensor_of(seed)}
    )
    call(_QUANTIZE_MX, x, data, as_bytes(scales), x, ends, element, rule, seed, first_index)
    return data, scales


def quantize_nvfp4_grouped(
    x: torch.Tensor,
    ends: torch.Tensor,
    *,
    amaxes: torch.Tensor | None = None,
    rounding: str = "nearest",
    seed: Seed | None = None,
    first_index: int = 0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(data, scales, amaxes) of `x` [rows, K]: NVFP4 with an amax a group, scales swizzled.

    Of each group, `quantize_nvfp4(rows, global_amax=amaxes[i], ..., swizzled=True)`; an element's
    noise is that of its index in the whole matrix. x, ends, out: as for `quantize_fp8_grouped`.
    amaxes: FP32 [groups], `amax_nvfp4_grouped(x, ends)` if `None`.

    data: uint8 [rows, ceil(K / 2)]. scales: float8_e4m3fn, 1-D, in the layout of
    `quantize_mx_grouped`, with blocks of 16: a row of tiles has 4 * ceil(K / 64) columns. What no
    group has is NaN, 0x7F, its codes 7. Bytes moved an element of BF16: 4.56, 2.56 if the amaxes
    are given. Raises `ValueError` before anything is written.
    """
    _check_grouped(x, ends)
    seed = checked_seed(rounding, seed, x.device)
    check_first_index(first_index, x.numel())
    if amaxes is not None:
        check_like("amaxes", amaxes, ends.shape, torch.float32, x.device)
    num_scales = _num_scales(x, ends, NVFP4.num_blocks(x.shape[1]))
    wanted = (
        ((x.shape[0], NVFP4.data_bytes(x.shape[1])), E2M1.dtype),
        ((num_scales,), E4M3.dtype),
    )
    sources = {"x": x, "ends": ends, "amaxes": amaxes, "seed": tensor_of(seed)}
    data, scales = results_of(out, wanted, x.device, sources)
    if amaxes is None:
        amaxes = amax_nvfp4_grouped(x, ends)
    call(_QUANTIZE_NVFP4, x, data, scales, x, ends, amaxes, seed, first_index)
    return data, scales, amaxes


def amax_nvfp4_grouped(
    x: torch.Tensor, ends: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """FP32 [groups]: the largest magnitude in each group's rows of `x`, NaNs left out, 0 in none.

    x, ends: as for `quantize_fp8_grouped`; where no host looks, wrong ends make all of them NaN.
    out: written into instead, its memory apart. Raises `ValueError` before anything is written.
    """
    _check_grouped(x, ends)
    sources = {"x": x, "ends": ends}
    out = result_of(out, (ends.shape, torch.float32), x.device, sources)
    call(_AMAX, x, out, x, ends)
    return out


def _num_scales(x: torch.Tensor, ends: torch.Tensor, num_blocks: int) -> int:
    check_row_blocks("x", num_blocks)
    return reference.scales_numel(x.shape[0], num_blocks, ends.shape[0])


def _check_grouped(x: torch.Tensor, ends: torch.Tensor) -> None:
    """Raise unless `x` is a matrix, and `ends` may be those of its groups, as far as hosts see."""
    check_source("x", x)
    if x.dim() != _MATRIX_DIMS or x.shape[0] > _MAX_ROWS:
        raise ValueError(
            f"x: expected [rows, K] of at most {_MAX_ROWS} rows, got shape {tuple(x.shape)}; view "
            "it as a matrix, or cut it"
        )
    check_dtype("ends", ends, _END_DTYPES)
    check_device("ends", ends, x.device)
    check_vector("ends", ends)
    if not 1 <= ends.shape[0] <= MAX_GROUPS:
        raise ValueError(
            f"ends: expected 1 to {MAX_GROUPS} groups, got {ends.shape[0]}; pass one end a group"
        )
    if (
        ends.device.type == "cpu"
        and type(ends) in PLAIN_TYPES
        and not torch.compiler.is_compiling()
    ):
        _check_ends(ends.tolist(), x.shape[0])


def _check_ends(ends: list[int], num_rows: int) -> None:
    for index, (start, end) in enumerate(pairwise([0, *ends])):
        if not start <= end <= num_rows:
            raise ValueError(
                f"ends[{index}]: expected {start}, where the group before ends, to {num_rows}, the "
                f"rows of x, got {end}; sort rows by group, and pass where each group ends"
            )
