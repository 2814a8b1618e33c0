"""FP8 with scales, `quantize_fp8`, `dequantize_fp8`, `update_fp8_scales_`: arguments and ops.

| scaling | a block                  | `scale_inv` for [.., rows, columns]              | passes |
|---------|--------------------------|--------------------------------------------------|--------|
| tensor  | everything               | []                                               | 2 (*)  |
| row     | a row                    | [.., rows, 1]                                    | 1 (**) |
| 1x128   | 128 elements of a row    | [.., rows, ceil(columns / 128)]                  | 1      |
| 128x128 | 128 x 128 of a matrix    | [.., ceil(rows / 128), ceil(columns / 128)]      | 1      |

(*) 1 with `scale`; (**) 2 for rows of more than 16384 elements. Bytes moved an element: a source
element a pass, 1 for its code, 4 over the block's size for the scale; 3.03 for BF16 in 1x128.

    codes = encode(x * scale)     scale = max_finite / amax     scale_inv = 1 / scale is returned

So the two words are told apart: `scale` multiplies what is quantised, `scale_inv` what comes back.
Both divisions are IEEE's and one a block; the elements cost one product. This is the formula of
TransformerEngine's Float8 quantizers and of torchao's `float8`, so their bits are ours; x / (amax /
448) and x * (1 / (amax / 448)), as others have it, differ from it in the last bit of some scales
and in the codes of elements near a tie. `reference` has all of the definition.

NaN and infinity: amax ignores nothing, and a block whose amax is not finite, or 0, has scale 1;
there, as anywhere, too large an element and infinity saturate and NaN is 0x7F. No other block
sees any of it.
"""

from __future__ import annotations

import torch

from ..aliasing import check_apart
from ..arguments import check_source, result_of, results_of
from ..checks import (
    check_choice,
    check_contiguous,
    check_dtype,
    check_flag,
    check_integer,
    check_like,
    check_one,
    check_result_dtype,
)
from ..op import Op, call, on_first_use
from . import reference
from .reference import BY_DTYPE, CAST_ELEMENTS, scale_shape

MIN_DIMS = {"tensor": 0, "row": 1, "1x128": 1, "128x128": 2}
ALGORITHMS = ("max", "most_recent")
MAX_HISTORY = 16384
MAX_MARGIN = 100  # beyond it max_finite * 2^-margin would come near FP32's subnormals
_HISTORY_DIMS = 2

_QUANTIZE = Op(
    "quantize_fp8_(Tensor(a!) codes, Tensor(b!) scale_inv, Tensor x, str scaling, "
    "bool power_of_2, Tensor? scale, Tensor(c!)? amax) -> ()",
    reference.quantize_fp8_,
    on_first_use("fp8.kernel", "quantize_fp8_"),
)
_DEQUANTIZE = Op(
    "dequantize_fp8_(Tensor(a!) out, Tensor codes, Tensor scale_inv, str scaling) -> ()",
    reference.dequantize_fp8_,
    on_first_use("fp8.kernel", "dequantize_fp8_"),
)
_UPDATE = Op(
    "update_fp8_scales_(Tensor(a!) amax_history, Tensor(b!) scales, str element, int margin, "
    "str algorithm) -> ()",
    reference.update_fp8_scales_,
    on_first_use("fp8.two_pass", "update_fp8_scales_"),
)


def quantize_fp8(
    x: torch.Tensor,
    *,
    scaling: str = "tensor",
    element: str = "e4m3",
    power_of_2: bool = False,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale_inv) of `x`: FP8 of its shape and FP32, the factors to dequantise with.

    x: FP32, BF16 or FP16, contiguous, any shape; the last block of a row or column may be short.
    scaling, and the shape of scale_inv for x [..., rows, columns]:

        "tensor"     []
        "row"        [..., rows, 1]
        "1x128"      [..., rows, ceil(columns / 128)]
        "128x128"    [..., ceil(rows / 128), ceil(columns / 128)]

    element: "e4m3", "e5m2", or "e4m3fnuz", gfx942's, its NaN 0x80. power_of_2: scales are rounded
    down to powers of two; then an input near FLT_MAX may be rounded up to 2^128, and decodes to
    infinity.
    scale: for delayed scaling, with scaling "tensor": one FP32 to multiply with, on the device, as
    `update_fp8_scales_` leaves it, used as it is. amax: only with `scale`, one FP32 >= 0 that
    becomes the larger of itself and max |x|, a NaN if there is one: pass `amax_history[i, 0]`.
    out: memory for the results. What is written shares no memory with anything else here. Raises
    `ValueError` before anything is written.
    """
    check_choice("scaling", scaling, MIN_DIMS)
    check_choice("element", element, CAST_ELEMENTS)
    check_source("x", x)
    _check_dims("x", x, scaling)
    power_of_2 = check_flag("power_of_2", power_of_2)
    check_delayed(x, scaling, power_of_2, scale, amax)
    wanted = (x.shape, CAST_ELEMENTS[element].dtype), (scale_shape(x.shape, scaling), torch.float32)
    sources = {"x": x, "scale": scale}
    codes, scale_inv = results_of(out, wanted, x.device, {**sources, "amax": amax})
    if amax is not None:
        check_apart({"amax": amax}, sources)
    if x.numel():
        call(_QUANTIZE, codes, codes, scale_inv, x, scaling, power_of_2, scale, amax)
    else:
        with torch.no_grad():
            ones = torch.ones_like(scale_inv)
            scale_inv.copy_(ones if scale is None else ones / scale.view(()))
    return codes, scale_inv


def dequantize_fp8(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    scaling: str = "tensor",
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """decode(code) * scale_inv of its block, in FP32, rounded to `dtype`: of the codes' shape.

    codes: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz, contiguous. scale_inv and scaling: as
    `quantize_fp8` has them. dtype: FP32, BF16 or FP16. out: memory for the result, apart from
    theirs. Raises `ValueError` before anything is written.
    """
    check_choice("scaling", scaling, MIN_DIMS)
    check_dtype("codes", codes, tuple(BY_DTYPE))
    check_contiguous("codes", codes)
    _check_dims("codes", codes, scaling)
    shape = scale_shape(codes.shape, scaling)
    check_like("scale_inv", scale_inv, shape, torch.float32, codes.device)
    check_result_dtype(dtype)
    sources = {"codes": codes, "scale_inv": scale_inv}
    out = result_of(out, (codes.shape, dtype), codes.device, sources)
    if codes.numel():
        call(_DEQUANTIZE, out, out, codes, scale_inv, scaling)
    return out


def update_fp8_scales_(
    amax_history: torch.Tensor,
    scales: torch.Tensor,
    *,
    element: str = "e4m3",
    margin: int = 0,
    algorithm: str = "max",
) -> None:
    """The next scale of every tensor from its history, which moves on: delayed scaling's step.

    amax_history: FP32 [tensors, length], contiguous, length 1 to 16384; [:, 0] is the newest.
    scales: FP32 [tensors], for `quantize_fp8(scale=scales[i])`. margin: how many powers of two to
    stay below the largest value, 0 to 100. algorithm: "max" over the history or "most_recent".

    scale = (max_finite / 2^margin) / amax, at least 2^-126, whose inverse is finite, and at most
    FLT_MAX; the old one stays where amax is 0 or not finite, so for as long as such an amax is in
    the history with "max". Then the history rolls by one and [:, 0] is 0. All on the device in one
    launch, whatever the number of tensors; for several ranks, reduce `amax_history[:, 0]` by
    maximum first. Formula: TransformerEngine, "Delayed scaling", but for the least scale. Raises
    `ValueError` before anything is written.
    """
    check_choice("element", element, CAST_ELEMENTS)
    check_choice("algorithm", algorithm, ALGORITHMS)
    margin = check_integer("margin", margin, 0, MAX_MARGIN)
    check_dtype("amax_history", amax_history, (torch.float32,))
    if amax_history.dim() != _HISTORY_DIMS or not 1 <= amax_history.shape[1] <= MAX_HISTORY:
        raise ValueError(
            f"amax_history: expected shape (tensors, length) with length 1 to {MAX_HISTORY}, got "
            f"{tuple(amax_history.shape)}; pass one row a tensor"
        )
    check_contiguous("amax_history", amax_history)
    check_like("scales", scales, amax_history.shape[:1], torch.float32, amax_history.device)
    check_apart({"amax_history": amax_history, "scales": scales}, {})
    if scales.numel():
        call(_UPDATE, scales, amax_history, scales, element, margin, algorithm)


def _check_dims(name: str, tensor: torch.Tensor, scaling: str) -> None:
    if tensor.dim() < MIN_DIMS[scaling]:
        raise ValueError(
            f"{name}: expected at least {MIN_DIMS[scaling]} dimensions for scaling {scaling!r}, "
            f"got shape {tuple(tensor.shape)}; reshape it or choose another scaling"
        )


def check_delayed(
    x: torch.Tensor,
    scaling: str,
    power_of_2: bool,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    """Raise unless `scale` and `amax` are there, or not, as delayed scaling has them."""
    for name, tensor in (("scale", scale), ("amax", amax)):
        if tensor is not None:
            check_one(name, tensor, (torch.float32,), x.device)
    if amax is not None and scale is None:
        raise ValueError(
            "amax: expected None without scale, got a tensor; leave it out, or pass a scale as well"
        )
    if scale is not None and (scaling != "tensor" or power_of_2):
        raise ValueError(
            f"scale: expected None with scaling {scaling!r} and power_of_2 {power_of_2}, got a "
            'tensor; leave it out, or use scaling "tensor" and make the scale a power of two'
        )
