"""A matrix and its transpose quantised in one read: what the functions accept, and the ops.

A layer's backward pass reads its operands along their other side: a product over rows wants blocks
of codes along columns. Two casts read the matrix twice, and the transpose between them moves it
twice more; these read it once. Both results are rows of their own matrix: `rows` as the cast of the
format makes them of x, `columns` as it makes them of x.t().contiguous(), bit for bit.

| function                       | bytes an element of BF16 | two casts, the transpose given |
|--------------------------------|--------------------------|--------------------------------|
| quantize_mx_with_transpose     | 4.06 (3.06 for e2m1)     | 6.06 (5.06)                    |
| quantize_nvfp4_with_transpose  | 3.13                     | 5.13                           |
| amax_nvfp4_with_transpose      | 2                        | 4                              |
| quantize_fp8_with_transpose    | 6, 4 with `scale`        | 8, 6                           |

Beside TransformerEngine, which has the same for its quantizers: the rules of amaxes and scales are
its, with what the casts' own docstrings tell apart. Ours differ in this. Its column-wise MXFP8
lies as x does, with scales [rows / 32, columns]; ours is transposed, as its NVFP4 and FP8 are, and
torchao's MXFP8. Its scales are padded to multiples of 128 and 4, ours only where swizzled. Its
transform is a product of BF16 matrices, whose sums have no order that is told; ours has one. Its
noise depends on the launch, ours on an element's index in either result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..aliasing import check_apart
from ..arguments import Wanted, check_source, results_of
from ..checks import check_choice, check_flag, check_pair
from ..formats.noise import Seed, check_first_index, checked_seed
from ..formats.table import SCALE_RULES
from ..fp8.op import check_delayed
from ..fp8.reference import CAST_ELEMENTS
from ..mx.op import as_bytes
from ..mx.op import parts_of as mx_parts_of
from ..mx.reference import BLOCK_NUMEL as MX_BLOCK
from ..mx.reference import elements
from ..numbers import tensor_of
from ..nvfp4.op import amax_nvfp4, checked_amax
from ..nvfp4.op import parts_of as nvfp4_parts_of
from ..nvfp4.reference import BLOCK_NUMEL as NVFP4_BLOCK
from ..op import Op, call, on_first_use
from . import reference

# cuBLASLt, "cublasLtMatmul": dimensions of FP8 matrices are multiples of 16.
_FP8_MULTIPLE = 16
_MATRIX_DIMS = 2

Pair = tuple[torch.Tensor, torch.Tensor]
Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_QUANTIZE_MX = Op(
    "quantize_mx_with_transpose_(Tensor(a!) data, Tensor(b!) scales, Tensor(c!) data_t, "
    "Tensor(d!) scales_t, Tensor x, str element, str rule, SymInt? seed, SymInt first_index, "
    "bool swizzled, *, Tensor? seed_tensor=None) -> ()",
    reference.quantize_mx_with_transpose_,
    on_first_use("transposed.mx", "quantize_mx_with_transpose_"),
)
_QUANTIZE_NVFP4 = Op(
    "quantize_nvfp4_with_transpose_(Tensor(a!) data, Tensor(b!) scales, Tensor(c!) data_t, "
    "Tensor(d!) scales_t, Tensor x, Tensor amax, Tensor amax_t, SymInt? seed, "
    "SymInt first_index, bool hadamard, bool square, bool swizzled, *, "
    "Tensor? seed_tensor=None) -> ()",
    reference.quantize_nvfp4_with_transpose_,
    on_first_use("transposed.nvfp4", "quantize_nvfp4_with_transpose_"),
)
_AMAX_NVFP4 = Op(
    "amax_nvfp4_with_transpose_(Tensor(a!) amax, Tensor(b!) amax_t, Tensor x) -> ()",
    reference.amax_nvfp4_with_transpose_,
    on_first_use("transposed.nvfp4", "amax_nvfp4_with_transpose_"),
)
_QUANTIZE_FP8 = Op(
    "quantize_fp8_with_transpose_(Tensor(a!) codes, Tensor(b!) codes_t, Tensor(c!) scale_inv, "
    "Tensor x, bool power_of_2, Tensor? scale, Tensor(d!)? amax) -> ()",
    reference.quantize_fp8_with_transpose_,
    on_first_use("transposed.fp8", "quantize_fp8_with_transpose_"),
)


def quantize_mx_with_transpose(
    x: torch.Tensor,
    *,
    element: str = "e4m3",
    rule: str = "rceil",
    rounding: str = "nearest",
    seed: Seed | None = None,
    first_index: int = 0,
    swizzled: bool = False,
    out: tuple[Pair, Pair] | None = None,
) -> tuple[Pair, Pair]:
    """MXFP8 or MXFP4 of a matrix and of its transpose: (data, scales) twice, rows and columns.

    x: [M, N], FP32, BF16 or FP16, contiguous, both multiples of 32. The first pair is what
    `quantize_mx` returns for x with these options, the second what it returns for
    x.t().contiguous(): data [N, M], a scale for 32 elements of a column of x. So an element has
    other noise in each, that of its index there. Bytes moved an element, of BF16: 4.06, or 3.06 for
    e2m1. out: written into instead, both pairs. Raises `ValueError` before anything is written.
    """
    check_choice("element", element, elements())
    check_choice("rule", rule, SCALE_RULES)
    swizzled = check_flag("swizzled", swizzled)
    _check_matrix(x, MX_BLOCK, f"blocks of {MX_BLOCK} run along both")
    seed = checked_seed(rounding, seed, x.device)
    check_first_index(first_index, x.numel())
    wanted = [mx_parts_of(shape, element, swizzled) for shape in _shapes_of(x)]
    rows, columns = _pairs_of(out, wanted, x.device, {"x": x, "seed": tensor_of(seed)})
    made = [(data, as_bytes(scales)) for data, scales in (rows, columns)]
    call(_QUANTIZE_MX, x, *made[0], *made[1], x, element, rule, seed, first_index, swizzled)
    return rows, columns


def quantize_nvfp4_with_transpose(
    x: torch.Tensor,
    *,
    amaxes: Pair | None = None,
    rounding: str = "nearest",
    seed: Seed | None = None,
    first_index: int = 0,
    hadamard: bool = False,
    square: bool = False,
    swizzled: bool = False,
    out: tuple[Pair, Pair] | None = None,
) -> tuple[Quantized, Quantized]:
    """NVFP4 of a matrix and of its transpose: (data, scales, amax) twice, rows and columns.

    x: [M, N], FP32, BF16 or FP16, contiguous, both multiples of 16. The first triple is what
    `quantize_nvfp4` returns for x, of variant "te", the second what it returns for
    x.t().contiguous(), with `hadamard` as given: the transform is that of columns alone, in groups
    of 16 along them, with the signs of `hadamard16`. Noise is that of an element's index in each.
    Bytes moved an element of BF16: 3.13, 5.13 if the amaxes are not given.

    amaxes: of x and of what its columns are made of, on the device of x; by default
    `amax_nvfp4_with_transpose(x)` with the transform, and `amax_nvfp4(x)` for both without. With
    `square` the first is for both.
    square: a scale is that of a square of 16 x 16, for the sixteen rows that have a part of it and
    for the sixteen columns, so that both stand for the same numbers: for weights. Therefore neither
    with the transform, which only the columns have, nor stochastic, as noise differs.
    swizzled: scales are 1-D, in the layout of `swizzle_scales`. out: (data, scales) twice, written
    into instead. Raises `ValueError` before anything is written.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, sections 4.1 to 4.4.
    """
    hadamard, square = check_flag("hadamard", hadamard), check_flag("square", square)
    swizzled = check_flag("swizzled", swizzled)
    _check_square(square, hadamard, rounding)
    _check_matrix(x, NVFP4_BLOCK, f"blocks of {NVFP4_BLOCK} run along both")
    seed = checked_seed(rounding, seed, x.device)
    check_first_index(first_index, x.numel())
    if amaxes is not None:
        check_pair("amaxes", amaxes)
        one, other = (
            checked_amax(f"amaxes[{at}]", amax, x.device) for at, amax in enumerate(amaxes)
        )
        amaxes = one, one if square else other
    wanted = [nvfp4_parts_of(shape, swizzled) for shape in _shapes_of(x)]
    sources = {"x": x, "seed": tensor_of(seed)}
    sources |= {f"amaxes[{at}]": amax for at, amax in enumerate(amaxes or ())}
    rows, columns = _pairs_of(out, wanted, x.device, sources)
    if amaxes is None:
        amaxes = amax_nvfp4_with_transpose(x) if hadamard else (amax_nvfp4(x),) * 2
    options = (seed, first_index, hadamard, square, swizzled)
    call(_QUANTIZE_NVFP4, x, *rows, *columns, x, *amaxes, *options)
    return (*rows, amaxes[0]), (*columns, amaxes[1])


def amax_nvfp4_with_transpose(x: torch.Tensor, *, out: Pair | None = None) -> Pair:
    """The amaxes of a matrix and of its transpose's Hadamard transform: FP32, 0-d, NaNs left out.

    `amax_nvfp4(x)` and `amax_nvfp4(x.t().contiguous(), hadamard=True)`, in one read. x: [M, N],
    FP32, BF16 or FP16, contiguous, both multiples of 16. out: both, written into instead. Raises
    `ValueError` before anything is written.
    """
    _check_matrix(x, NVFP4_BLOCK, f"blocks of {NVFP4_BLOCK} run along both")
    amax, amax_t = results_of(out, [((), torch.float32)] * 2, x.device, {"x": x})
    call(_AMAX_NVFP4, x, amax, amax_t, x)
    return amax, amax_t


def quantize_fp8_with_transpose(
    x: torch.Tensor,
    *,
    element: str = "e4m3",
    power_of_2: bool = False,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """FP8 of a matrix and of its transpose, with one scale: (codes, transposed codes, scale_inv).

    x: [M, N], FP32, BF16 or FP16, contiguous, both multiples of 16, as FP8 matrix products want
    them. codes and scale_inv are what `quantize_fp8` returns for x, scaling "tensor", with these
    options; the transposed codes, [N, M], are theirs. Bytes moved an element of BF16: 6, 4 with
    `scale`. out: written into instead, all three. Raises `ValueError` before anything is written.
    """
    check_choice("element", element, CAST_ELEMENTS)
    _check_matrix(x, _FP8_MULTIPLE, "products of FP8 matrices want them")
    power_of_2 = check_flag("power_of_2", power_of_2)
    check_delayed(x, "tensor", power_of_2, scale, amax)
    dtype = CAST_ELEMENTS[element].dtype
    wanted = (x.shape, dtype), (x.shape[::-1], dtype), ((), torch.float32)
    sources = {"x": x, "scale": scale}
    codes, codes_t, scale_inv = results_of(out, wanted, x.device, {**sources, "amax": amax})
    if amax is not None:
        check_apart({"amax": amax}, sources)
    if x.numel():
        call(_QUANTIZE_FP8, x, codes, codes_t, scale_inv, x, power_of_2, scale, amax)
    else:
        with torch.no_grad():
            scale_inv.copy_(scale_inv.new_ones(()) / (1.0 if scale is None else scale.view(())))
    return codes, codes_t, scale_inv


def _check_matrix(x: torch.Tensor, multiple: int, reason: str) -> None:
    """Raise unless it is a source of two dimensions that are multiples of this."""
    check_source("x", x)
    if x.dim() != _MATRIX_DIMS:
        raise ValueError(
            f"x: expected a matrix, got shape {tuple(x.shape)}; pass .view(-1, columns) of it"
        )
    if any(side % multiple for side in x.shape):
        padded = tuple(-(-side // multiple) * multiple for side in x.shape)
        raise ValueError(
            f"x: expected sides that are multiples of {multiple}, since {reason}, got shape "
            f"{tuple(x.shape)}; pad it with zeros to {padded}"
        )


def _shapes_of(x: torch.Tensor) -> tuple[torch.Size, torch.Size]:
    """Of a matrix and of its transpose."""
    return x.shape, torch.Size(x.shape[::-1])


def _check_square(square: bool, hadamard: bool, rounding: str) -> None:
    if square and (hadamard or rounding == "stochastic"):
        got = "hadamard" if hadamard else "'stochastic' rounding"
        raise ValueError(
            f"square: expected False with {got}, got True; both sides of square scales stand for "
            "the same numbers: round to nearest and without the transform"
        )


def _pairs_of(
    out: tuple[Pair, Pair] | None,
    wanted: Sequence[tuple[Wanted, Wanted]],
    device: torch.device,
    sources: dict[str, torch.Tensor | None],
) -> tuple[Pair, Pair]:
    """Memory for data and scales of both sides, all four apart."""
    if out is not None:
        check_pair("out", out)
    found: dict[str, torch.Tensor] = {}
    for side, parts in enumerate(wanted):
        name = f"out[{side}]"
        made = results_of(None if out is None else out[side], parts, device, sources, name)
        found |= {f"{name}[{index}]": tensor for index, tensor in enumerate(made)}
    check_apart(found, {})
    data, scales, data_t, scales_t = found.values()
    return (data, scales), (data_t, scales_t)
