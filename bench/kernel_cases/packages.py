"""Rivals from packages of their own, as their users run them: torchao and TransformerEngine.

    torchao, compiled     its PyTorch through torch.compile, which it is written for
    torchao, Triton       its kernels
    TransformerEngine     its quantisers, into memory that is there; on a GPU

Each is a `Bind` that raises ImportError where its package is missing, and the package's own error
where that refuses the machine: the runner leaves it out and says so. A name tells what a rival does
besides: "amax" that it looks for the largest number too, "columns" that it writes columns.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from ...kernels.case import Operands
from .competitors import COMPILED, Bind, Run

TORCHAO, TORCHAO_TRITON = f"torchao, {COMPILED}", "torchao, Triton"
ENGINE = "TransformerEngine"
_MX = "torchao.prototype.mx_formats"
_BLOCKWISE = "torchao.prototype.blockwise_fp8_training.kernels"


@contextmanager
def quiet() -> Iterator[None]:
    """What a rival tells while it is loaded, compiled and tried is nobody's business here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def fp8(scaling: str) -> dict[str, Bind]:
    """For a scale a tensor and a row torchao's PyTorch, for blocks its kernels; and but for rows
    TransformerEngine.
    """
    found: dict[str, Bind] = {}
    if scaling in ("tensor", "row"):
        found[TORCHAO] = lambda operands: _torchao_fp8(scaling, operands)
    elif scaling == "1x128":
        found[TORCHAO_TRITON] = _called(_BLOCKWISE, "triton_fp8_blockwise_act_quant_lhs", 128)
    else:
        name = "triton_fp8_blockwise_weight_quant_transposed_rhs"
        found[f"{TORCHAO_TRITON}, columns"] = _called(_BLOCKWISE, name, 128)
    if scaling != "row":
        found[ENGINE] = lambda operands: _engine_run(operands, _engine_fp8(scaling, operands))
    return found


def mx(element: str) -> dict[str, Bind]:
    """torchao's PyTorch, and for MXFP8 its kernel and TransformerEngine."""

    def torchao(operands: Operands) -> Run:
        to_mx = import_module(f"{_MX}.mx_tensor").to_mx
        dtype = torch.float8_e4m3fn if element == "e4m3" else torch.float4_e2m1fn_x2
        return _compiled(to_mx, operands.read[0], dtype, 32)

    def engine(operands: Operands) -> Run:
        te, dtypes = _engine()
        quantizer = te.MXFP8Quantizer(dtypes.kFloat8E4M3, rowwise=True, columnwise=False)
        return _engine_run(operands, quantizer)

    if element != "e4m3":
        return {TORCHAO: torchao}
    kernel = _called(f"{_MX}.kernels", "triton_to_mxfp8_dim0", 32)
    return {TORCHAO: torchao, TORCHAO_TRITON: kernel, ENGINE: engine}


def mxfp8_back() -> dict[str, Bind]:
    """torchao's kernel."""

    def kernel(operands: Operands) -> Run:
        _require_gpu()
        function = import_module(f"{_MX}.kernels").triton_mxfp8_dequant_dim0
        (data, scales), (out,) = operands.read, operands.written
        return lambda: function(data, scales, out.dtype, 32)

    return {TORCHAO_TRITON: kernel}


def nvfp4() -> dict[str, Bind]:
    """torchao's PyTorch and its kernel, with a known scale; TransformerEngine."""

    def scale(operands: Operands) -> torch.Tensor:
        theirs = import_module(f"{_MX}.nvfp4_tensor")
        found: torch.Tensor = theirs.per_tensor_amax_to_scale(operands.scalars[0])
        return found

    def torchao(operands: Operands) -> Run:
        function = import_module(f"{_MX}.nvfp4_tensor").nvfp4_quantize
        return _compiled(function, operands.read[0], 16, scale(operands))

    def kernel(operands: Operands) -> Run:
        _require_gpu()
        function = import_module(f"{_MX}.kernels").triton_quantize_nvfp4
        x, known = operands.read[0], scale(operands)
        return lambda: function(x, known)

    return {TORCHAO: torchao, TORCHAO_TRITON: kernel, f"{ENGINE}, amax": _engine_nvfp4()}


def stochastic_nvfp4() -> dict[str, Bind]:
    """TransformerEngine, with noise of its own."""
    return {f"{ENGINE}, amax": _engine_nvfp4(stochastic_rounding=True)}


def rotated_nvfp4() -> dict[str, Bind]:
    """TransformerEngine, which rotates columns alone, and BF16 alone."""
    rotated = _engine_nvfp4(rowwise=False, columnwise=True, with_rht=True, with_post_rht_amax=True)
    return {f"{ENGINE}, amax, columns": rotated}


def _called(module: str, name: str, *arguments: object) -> Bind:
    """A function of a package on what is read, after which come the arguments."""

    def bind(operands: Operands) -> Run:
        _require_gpu()
        function = getattr(import_module(module), name)
        (x,) = operands.read
        return lambda: function(x, *arguments)

    return bind


def _compiled(function: Callable[..., object], *arguments: object) -> Run:
    compiled = torch.compile(function, dynamic=False)
    return lambda: compiled(*arguments)


def _torchao_fp8(scaling: str, operands: Operands) -> Run:
    utils = import_module("torchao.float8.float8_utils")
    granularity = import_module("torchao.float8.config").ScalingGranularity
    options: dict[str, Any] = {"scaling_granularity": granularity.TENSORWISE}
    if scaling == "row":
        options = {"scaling_granularity": granularity.AXISWISE, "axiswise_dim": -1}

    def quantize(x: torch.Tensor) -> tuple[object, object]:
        scale = utils.tensor_to_scale(x, torch.float8_e4m3fn, **options)
        return utils.to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn), scale

    return _compiled(quantize, operands.read[0])


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise ImportError("it needs a GPU")


def _engine() -> tuple[Any, Any]:
    _require_gpu()
    return (
        import_module("transformer_engine.pytorch"),
        import_module("transformer_engine_torch").DType,
    )


def _engine_fp8(scaling: str, operands: Operands) -> Any:
    te, dtypes = _engine()
    element = dtypes.kFloat8E4M3
    if scaling == "tensor":
        quantizer = te.Float8CurrentScalingQuantizer(element, device=operands.read[0].device)
        quantizer.set_usage(rowwise=True, columnwise=False)
        return quantizer
    return te.Float8BlockQuantizer(
        element,
        rowwise=True,
        columnwise=False,
        force_pow_2_scales=False,
        block_scaling_dim=1 if scaling == "1x128" else 2,
    )


def _engine_nvfp4(**options: bool) -> Bind:
    wanted = {"rowwise": True, "columnwise": False, **options}

    def bind(operands: Operands) -> Run:
        te, _ = _engine()
        return _engine_run(operands, te.NVFP4Quantizer(**wanted))

    return bind


def _engine_run(operands: Operands, quantizer: Any) -> Run:
    """A call that quantises what is read into memory that is there."""
    (x,) = operands.read
    out = quantizer.make_empty(x.shape, dtype=x.dtype, device=x.device)
    return lambda: quantizer.update_quantized(x, out)
